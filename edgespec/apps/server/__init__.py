"""The server: OpenAI's, Anthropic's and Ollama's APIs and a page (extra `edgespec[serve]`)."""
