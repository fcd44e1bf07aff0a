"""The machine and its operating system: processor, memory, files, signals, child processes."""
