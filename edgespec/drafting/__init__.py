"""Drafting: kinds of drafts, their sources of tokens, learned state, the scheduler (docs/scheduler.md)."""
