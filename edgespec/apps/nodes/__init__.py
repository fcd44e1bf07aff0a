"""Nodes: machines that hold layers of a model which another machine runs (docs/many-machines.md)."""
