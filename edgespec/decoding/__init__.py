"""The exact loop: propose a tree of tokens, verify it in one pass, emit (docs/how-it-works.md)."""
