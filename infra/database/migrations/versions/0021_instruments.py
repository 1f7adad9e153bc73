"""The instruments that brokers list, how they are loaded, and changed lots that wait for a yes."""

from alembic import op

revision = "0021"
down_revision = "0020"

#: The columns for what a broker tells of an instrument. `collate "C"` makes a prefix of a code a
#: range of the key.
_TOLD = """
  code varchar(32) collate "C" not null,
  name varchar(120) not null default '',
  market varchar(16) not null,
  kind varchar(16) not null,
  lot_units integer not null,
  lot_value numeric(18, 6) not null,
  ticks jsonb not null default '[]',
  reference numeric(18, 6),
  limit_up numeric(18, 6),
  limit_down numeric(18, 6),
  expires_on date,
  day_trade boolean,
  underlying varchar(32) not null default ''
"""


def upgrade() -> None:
    op.execute(
        f"""create table instruments (
          broker varchar(32) not null,
          {_TOLD},
          loaded_on date not null,
          loaded_at timestamptz not null default clock_timestamp(),
          listed boolean not null default true,
          primary key (broker, code)
        )"""
    )
    op.execute("create index instruments_by_day on instruments (loaded_on) where not listed")
    # It goes with its account, also where a process of the release before removes that.
    op.execute(
        """create table instrument_sources (
          broker varchar(32) primary key,
          user_id varchar(64) not null,
          account_id varchar(64) not null,
          set_by varchar(128) not null,
          set_at timestamptz not null default clock_timestamp(),
          foreign key (user_id, account_id) references broker_accounts (user_id, account_id)
            on delete cascade
        )"""
    )
    op.execute("create index instrument_sources_by_user on instrument_sources (user_id)")
    op.execute(
        """create table instrument_loads (
          id bigint generated always as identity primary key,
          broker varchar(32) not null,
          user_id varchar(64) not null,
          account_id varchar(64) not null,
          trading_day date not null,
          state varchar(16) not null
            constraint instrument_loads_state
            check (state in ('running', 'loaded', 'refused', 'failed')),
          began_at timestamptz not null default clock_timestamp(),
          ended_at timestamptz,
          instruments integer not null default 0,
          added integer not null default 0,
          removed integer not null default 0,
          pending integer not null default 0,
          error varchar(500) not null default ''
        )"""
    )
    op.execute("create index instrument_loads_by_broker on instrument_loads (broker, id)")
    op.execute(
        """create index instrument_loads_loaded on instrument_loads (broker, trading_day)
          where state = 'loaded'"""
    )
    op.execute(
        f"""create table instrument_staging (
          load_id bigint not null references instrument_loads on delete cascade,
          {_TOLD},
          primary key (load_id, code)
        )"""
    )
    op.execute(
        """create table instrument_changes (
          id bigint generated always as identity primary key,
          broker varchar(32) not null,
          code varchar(32) collate "C" not null,
          old_lot_units integer not null,
          old_lot_value numeric(18, 6) not null,
          new_lot_units integer not null,
          new_lot_value numeric(18, 6) not null,
          since date not null,
          found_at timestamptz not null default clock_timestamp(),
          resolution varchar(16)
            constraint instrument_changes_resolution
            check (resolution in ('approved', 'withdrawn')),
          resolved_at timestamptz,
          resolved_by varchar(128)
        )"""
    )
    op.execute(
        """create unique index instrument_changes_open on instrument_changes (broker, code)
          where resolved_at is null"""
    )
