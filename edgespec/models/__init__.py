"""Models by name: the registry, the sources of files, their places, and whether they fit in memory."""
