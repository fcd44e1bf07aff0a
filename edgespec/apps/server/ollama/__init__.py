"""Ollama's API, translated: its requests become OpenAI's, and chunks become its lines."""
