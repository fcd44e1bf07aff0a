"""Several models at one address, each in its own process, which starts with the first request for it."""
