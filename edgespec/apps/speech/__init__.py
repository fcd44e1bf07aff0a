"""Speech to text: Whisper on edgespec's kernels, decoded by the exact loop."""
