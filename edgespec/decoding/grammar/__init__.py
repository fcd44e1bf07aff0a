"""Text that must match a grammar or a JSON schema (docs/structured.md)."""
