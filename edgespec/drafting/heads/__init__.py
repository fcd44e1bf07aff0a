"""Kinds of draft heads, beside the core, which finds them as entry points (edgespec/platform/plugins.py)."""
