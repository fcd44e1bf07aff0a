"""OpenAI's Responses API, translated: its items become messages, and chunks become its events."""
