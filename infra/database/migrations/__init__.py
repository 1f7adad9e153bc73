"""Contains the Alembic migrations, which `infra.database.migrate` runs.

Not here: the tables as they are now (`infra/database/models.py` and the models of each folder).
"""
