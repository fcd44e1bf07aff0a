"""Trains drafts on what the target wrote, with JAX on the processors (extra `forge`)."""
