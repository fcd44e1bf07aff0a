"""What drafts, and how much of it: the sources, what is learnt of them, the scheduler (docs/scheduler.md)."""
