"""Budgets at the broker by user and person: whose names a worker has, and persons that two users
share."""

from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    # Null: sealed by the release before, whose names no longer count.
    op.execute("alter table worker_sessions add column budgets jsonb")
    op.execute(
        "alter table credentials"
        " add column persons jsonb not null default '[]',"
        " add column sealed_version integer not null default 0,"
        " add column confirmed_version integer not null default 0,"
        " add column match_due boolean not null default false"
    )
    op.execute("create index credentials_by_person on credentials using gin (persons)")
    op.execute(
        "create index credentials_to_match on credentials (user_id, account_id) where match_due"
    )
    op.execute(
        """create table failed_logins (
          id bigint generated always as identity primary key,
          user_id varchar(64) not null,
          at timestamptz not null default clock_timestamp()
        )"""
    )
    op.execute("create index failed_logins_by_user on failed_logins (user_id, at)")
    op.execute(
        """create table person_matches (
          id bigint generated always as identity primary key,
          broker varchar(32) not null,
          first_user varchar(64) not null references users,
          second_user varchar(64) not null references users,
          persons jsonb not null,
          found_at timestamptz not null default clock_timestamp(),
          shared_budget bigint,
          resolved_at timestamptz,
          resolved_by varchar(128)
        )"""
    )
    op.execute("create index person_matches_by_user on person_matches (first_user)")
    op.execute("create index person_matches_by_other_user on person_matches (second_user)")
