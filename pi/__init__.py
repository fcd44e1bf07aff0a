"""Developer's tools that make wheels: for the Raspberry Pi, and for machines without a compiler."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The repository."""
BUILD = ROOT / "build" / "pi"
"""Where all of pi/ works; nothing in it is needed by anyone else."""
DIST = ROOT / "dist"
"""Where wheels are put."""
