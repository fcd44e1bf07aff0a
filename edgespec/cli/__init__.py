"""The command line: parse, call, render. All rich output lives here."""

from edgespec.cli.app import main

__all__ = ["main"]
