"""Signals: what a webhook's quantities mean, its life, the queue of its calls, names of symbols.

Webhooks of before keep what they do: lots (unconfirmed), and entries that open their whole
quantity. The SQL is next to this file.
"""

from pathlib import Path

from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    for statement in (
        Path(__file__).with_suffix(".sql").read_text(encoding="utf-8").strip().split("\n\n")
    ):
        op.execute(statement)
