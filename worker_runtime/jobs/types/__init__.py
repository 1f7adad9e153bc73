"""Contains the code of each job type. What only one type needs is imported in its child process.

Not here: arguments, results and queues of a type (`worker_runtime/jobs/protocol/catalog.py`).
"""
