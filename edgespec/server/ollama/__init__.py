"""Ollama's API beside OpenAI's: its requests become ours, and our chunks become its lines."""
