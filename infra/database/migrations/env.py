"""Alembic's entry: it gets the connection from `infra.database.migrate`."""

from alembic import context

from infra.database.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    transaction_per_migration=True,  # what was done is done, when the one after it fails
)
with context.begin_transaction():
    context.run_migrations()
