"""Lists of instruments by broker and market, and designated accounts that outlive the account.

Release 0.1.0 knows none of these tables, so their keys may change.
"""

from alembic import op

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    # A broker's accounts may list only their own market, so each market may have its own account.
    op.execute("alter table instrument_sources add column market varchar(32)")
    op.execute(
        """update instrument_sources as source set market = account.broker_type
             from broker_accounts as account
            where account.user_id = source.user_id and account.account_id = source.account_id"""
    )
    op.execute(
        """alter table instrument_sources
          alter column market set not null,
          drop constraint instrument_sources_pkey,
          add primary key (broker, market)"""
    )
    # A designation stays when its account is removed: its list still ages, and must alert.
    op.execute(
        """alter table instrument_sources
          drop constraint instrument_sources_user_id_account_id_fkey"""
    )
    op.execute("drop index instrument_sources_by_user")
    # `market` is that of the account, `markets` are those of the instruments that it listed.
    op.execute(
        """alter table instrument_loads
          add column market varchar(32) not null default '',
          add column markets varchar(16)[] not null default '{}',
          add column prices_due boolean not null default false"""
    )
    op.execute(
        """update instrument_loads as load set market = source.market
             from instrument_sources as source where source.broker = load.broker"""
    )
    op.execute(
        """update instrument_loads as load
              set markets = array(select distinct market from instruments as known
                                   where known.broker = load.broker
                                     and known.loaded_on = load.trading_day)
            where state = 'loaded'"""
    )
