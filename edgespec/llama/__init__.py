"""llama.cpp: the library, its GGUF files, models, sessions, and edgespec's kernels inside it."""
