"""Several models at one address, each in a process of its own that is started when it is asked."""
