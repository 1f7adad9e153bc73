"""Contains all that runs in one user's container.

Not here: PostgreSQL, Temporal and FastAPI:
it imports no other top-level folder and no server library.
"""
