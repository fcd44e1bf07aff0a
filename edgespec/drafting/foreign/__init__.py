"""A draft model whose vocabulary is not the target's (docs/models.md)."""
