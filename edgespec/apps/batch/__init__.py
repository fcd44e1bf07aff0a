"""Answers a file of many requests: `edgespec batch`."""
