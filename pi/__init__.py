"""Developer's tools that make wheels: for the Raspberry Pi, and for machines without a compiler."""
