"""The audit trail may be shortened by what is older than a year, and by nothing younger."""

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.execute("drop trigger audit_trail_append_only on audit_trail")
    op.execute(
        "create trigger audit_trail_append_only before update or truncate on audit_trail "
        "for each statement execute function audit_trail_is_append_only()"
    )
    op.execute(
        "create trigger audit_trail_keeps_a_year before delete on audit_trail for each row "
        "when (old.at > clock_timestamp() - interval '365 days') "
        "execute function audit_trail_is_append_only()"
    )
