"""Measuring a pair: suites, runs, statistics, accuracy, reports (docs/measuring.md)."""
