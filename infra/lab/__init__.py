"""Contains benchmarks and chaos runs on systems of their own.

Not here: anything that the product imports; no production image contains this folder.
"""
