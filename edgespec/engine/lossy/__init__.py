"""The modes that do not keep the target's distribution (docs/scheduler.md)."""
