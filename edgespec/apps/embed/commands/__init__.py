"""Commands of this app, which the command line finds by entry points."""
