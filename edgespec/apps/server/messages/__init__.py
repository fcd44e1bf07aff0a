"""Anthropic's Messages API, translated: its requests become OpenAI's, and chunks become its events."""
