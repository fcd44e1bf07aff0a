"""The engine: a pair of models loaded, requests under way in shared passes, and the text that comes of it."""
