"""The apps: programs beside the core, each with its commands, its options and its page of the docs."""
