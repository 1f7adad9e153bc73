"""Runs several API processes on one port: their master, and the counts that they add up.

Not here: the application that each process serves (`api/app.py`), and the primary's tasks
(`api/fleet/primary.py`).
"""
