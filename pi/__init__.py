"""Developer's tools for the Raspberry Pi: `make pi`, `make pi-test`, `make deploy`. Not installed."""
