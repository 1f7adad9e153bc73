"""Runs several API processes on one port: their master, and the counts that they add up.

The master (`api/processes/master.py`) starts the processes, and restarts one that died or is
silent.

Not here: the application that each process serves (`api/app.py`), and the primary's tasks
(`api/fleet/primary.py`).
"""
