"""Alembic migrations, run by `infra.database.migrate`."""
