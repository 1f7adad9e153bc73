"""Decides who has which worker, since when, and what happens next: a folder for each workflow.

Not here: I/O of any kind; workflows call activities by name, each call written once in
`workflows/calls.py`.
"""
