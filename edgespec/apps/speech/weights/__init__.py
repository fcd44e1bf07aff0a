"""Whisper models as other programs store them, and their conversion to GGUF."""
