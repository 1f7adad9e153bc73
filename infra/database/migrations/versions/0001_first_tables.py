"""The tables of the first release. The SQL is next to this file, with a blank line between
statements."""

from pathlib import Path

from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    for statement in Path(__file__).with_suffix(".sql").read_text(encoding="utf-8").split("\n\n"):
        op.execute(statement)
