"""Stores what quantity changes were seen to mean at a broker, by version of its SDK, kind of lot
and mode."""

from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.execute(
        """create table quantity_change_confirmations (
          broker varchar(32) not null,
          sdk_version varchar(32) not null,
          lot varchar(16) not null,
          futures boolean not null,
          simulation boolean not null,
          meaning varchar(16) not null,
          evidence jsonb not null,
          actor varchar(128) not null,
          at timestamptz not null default clock_timestamp(),
          primary key (broker, sdk_version, lot, futures, simulation),
          constraint quantity_change_meaning check (meaning in ('reduce_by', 'new_total'))
        )"""
    )
