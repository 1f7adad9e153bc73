"""Stores how the login of each account stands, what the broker has rejected, and its own id of an
account.

Constant defaults: no row is rewritten, and the release before reads and writes as it did.
"""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.execute(
        """
        alter table broker_accounts
          add column number varchar(64) not null default '',
          add column login_code varchar(64) not null default '',
          add column login_detail varchar not null default '',
          add column login_epoch bigint not null default 0,
          add column login_ms bigint not null default 0,
          add column rejected_version integer not null default 0,
          add column login_rejected boolean not null default false
        """
    )
