"""Contains orders for tests: their states as a model, and the sweeper's harness."""
