"""Embeddings: vectors of files of text (docs/server.md)."""
