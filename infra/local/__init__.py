"""Runs the whole system as child processes on 127.0.0.1, for `make run`, tests and benchmarks.

Not here: the code of those processes; it starts them and imports none of them.
"""
