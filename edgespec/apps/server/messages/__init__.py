"""Anthropic's Messages API, translated: its requests become OpenAI's, and parts of answers its events."""
