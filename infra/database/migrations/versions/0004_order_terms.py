"""Orders have a lot, a condition and an open or close type; those of before have the usual ones."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.execute(
        "alter table orders"
        " add column lot varchar(16) default 'common' not null,"
        " add column condition varchar(16) default 'cash' not null,"
        " add column open_close varchar(16) default 'auto' not null"
    )
