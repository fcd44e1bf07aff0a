"""The engine: a loaded pair of models, requests that share passes, and their text."""
