"""When the certificate of a broker account expires, and how far ahead its user was last warned."""

from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    op.execute(
        """alter table broker_accounts
          add column certificate_expires_at timestamptz,
          add column certificate_warned_days smallint"""
    )
    # Those that expire soon are few: a look at them reads no other account.
    op.execute(
        """create index broker_accounts_by_certificate on broker_accounts (certificate_expires_at)
          where certificate_expires_at is not null"""
    )
