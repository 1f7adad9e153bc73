"""API keys have scopes, sources, a life and a maker. A key with scopes has a role word of its own.

The release before knows none of these words, and refuses such a key: it would grant all that the
role may do.
"""

from alembic import op

revision = "0014"
down_revision = "0012"

_ROLES = "'user', 'operator', 'admin', 'scoped_user', 'scoped_operator', 'scoped_admin'"


def upgrade() -> None:
    op.execute(
        f"""alter table api_keys
          add column scopes varchar(32)[] not null default '{{}}',
          add column sources varchar(64)[] not null default '{{}}',
          add column life_s bigint,
          add column made_by uuid,
          drop constraint api_keys_role,
          add constraint api_keys_role check (role in ({_ROLES}))"""
    )
    op.execute("create index api_keys_made_by on api_keys (made_by) where made_by is not null")
