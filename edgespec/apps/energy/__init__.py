"""Energy: the sources of energy figures on this machine, and the joules spent between two moments."""
