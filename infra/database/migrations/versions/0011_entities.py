"""Keeps what outlives a workflow that somebody ended: the operators' settings of a pool, and the
findings about entities."""

from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.execute(
        """create table pools (
          name varchar(64) primary key,
          number bigint not null,
          settings jsonb not null,
          changed_at timestamptz not null default clock_timestamp()
        )"""
    )
    op.execute(
        """create table entity_findings (
          entity varchar(160) primary key,
          kind varchar(32) not null,
          state varchar(16) not null,
          reason varchar not null,
          since timestamptz not null default clock_timestamp(),
          seen_at timestamptz not null default clock_timestamp()
        )"""
    )
    op.execute("create index entity_findings_by_time on entity_findings (seen_at)")
