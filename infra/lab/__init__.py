"""Benchmarks and chaos runs on stacks of their own. Nothing of the product imports this package."""
