"""Indexes for a year of rows, made while the service continues. The SQL is next to this file."""

from pathlib import Path

from alembic import op

from infra.database.migrate import without_transaction

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    with without_transaction():
        for index in (
            Path(__file__).with_suffix(".sql").read_text(encoding="utf-8").strip().split("\n\n")
        ):
            op.execute(f"drop index concurrently if exists {index.split()[0]}")
            op.execute(f"create index concurrently {index}")
        # The index by user serves as well.
        op.execute("drop index concurrently if exists worker_sessions_open")
