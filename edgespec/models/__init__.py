"""Models by name: the registry, where files come from, where they lie, and whether they fit."""
