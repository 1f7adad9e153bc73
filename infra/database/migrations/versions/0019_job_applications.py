"""Applications that run job types of their own, and the types that their runners have announced."""

from alembic import op

revision = "0019"
down_revision = "0016"


def upgrade() -> None:
    op.execute(
        """create table job_applications (
          name varchar(32) primary key,
          generation integer not null default 1,
          former_generation integer,
          created_at timestamptz not null default clock_timestamp(),
          created_by varchar(128) not null
        )"""
    )
    op.execute(
        """create table job_types (
          name varchar(160) not null,
          version integer not null,
          application varchar(32) not null references job_applications on delete cascade,
          package varchar(200) not null,
          package_version varchar(200) not null,
          definition jsonb not null,
          refusal varchar not null default '',
          announced_at timestamptz not null default clock_timestamp(),
          primary key (name, version)
        )"""
    )
    op.execute("create index job_types_by_application on job_types (application)")
    # Null: a job of Berth's own types, or one that a release before has kept.
    op.execute(
        "alter table kept_jobs add column type varchar(160), add column type_version integer"
    )
    # A job of an application is found by its id alone.
    op.execute("create index kept_jobs_by_id on kept_jobs (job_id) where user_id like 'app:%'")
