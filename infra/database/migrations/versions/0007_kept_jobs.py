"""Jobs that must not be lost, and the settings of job queues, stand in PostgreSQL."""

from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.execute(
        "create table kept_jobs (user_id varchar(64), job_id varchar(128), primary key "
        "(user_id, job_id), "
        "sealed bytea not null, digest varchar(64) not null, missing boolean not null default "
        "false, "
        "created_at timestamptz not null default clock_timestamp(), check_at timestamptz default "
        "clock_timestamp() + interval '30 seconds', outcome varchar(16), ended_at timestamptz)"
    )
    op.execute("create index kept_jobs_to_check on kept_jobs (check_at) where check_at is not null")
    op.execute("create table job_settings (user_id varchar(64) primary key, fields jsonb not null)")
