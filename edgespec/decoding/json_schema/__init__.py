"""JSON schemas, put so that the grammar library enforces what they say, and what of them it cannot."""
