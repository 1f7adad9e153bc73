"""Counts what each user asks for in a day, so that nobody fills the audit trail."""

from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.execute(
        """create table daily_acts (
          user_id varchar(64) not null,
          day date not null,
          acts integer not null,
          primary key (user_id, day)
        )"""
    )
