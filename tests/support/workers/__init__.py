"""Contains workers for tests: real processes, and scripted ones that only speak the protocol."""
