"""Embeddings: vectors of files of text (docs/embeddings.md)."""
