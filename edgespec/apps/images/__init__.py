"""Images in prompts: llama.cpp's own encoders (libmtmd) beside a target (docs/start.md)."""
