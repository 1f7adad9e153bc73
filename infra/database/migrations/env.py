"""Alembic's entry: it gets the connection, and so the transaction, from `infra.database.migrate`."""

from __future__ import annotations

from alembic import context

from infra.database.models import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
with context.begin_transaction():
    context.run_migrations()
