"""Counts for the metrics of the whole fleet, in one statement."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from infra.database.orders.states import OPEN_STATES

#: Metric, its labels and the value.
_COUNTS = text(f"""
select 'berth_workers_in_use', array[pool], count(*) from worker_sessions
 where ended_at is null and connected_at is not null group by pool
union all
select 'berth_orders_unsettled', array[wanted.state],
       (select count(*) from orders where orders.state = wanted.state)
  from (values ('submitting'), ('unknown')) as wanted (state)
union all
select 'berth_orders_unsettled', array['needs_attention'], count(*) from orders
 where attention is not null
   and state in ({", ".join(f"'{state}'" for state in sorted(OPEN_STATES))})
union all
select 'berth_switches_closed', array[split_part(scope, '\\:', 1), state], count(*) from switches
 where state <> 'open' group by 2
union all
select 'berth_differences_open', array[cast(blocks as text)], count(distinct (user_id, account_id))
  from reconciliations where resolved_at is null group by blocks
union all
select 'berth_person_matches_open', '{{}}', count(*) from person_matches where resolved_at is null
union all
select 'berth_instrument_changes_open', '{{}}', count(*) from instrument_changes
 where resolved_at is null
union all
select 'berth_instrument_loads_failing', array[broker, market, state], 1 from instrument_loads
 where state in ('refused', 'failed')
   and id in (select max(id) from instrument_loads where ended_at is not null
               group by broker, market)
   and (broker, market) in (select broker, market from instrument_sources)
union all
select 'berth_certificates_expiring', array[wanted.days],
       (select count(*) from broker_accounts where not simulation
           and certificate_expires_at
             <= clock_timestamp() + make_interval(days => cast(wanted.days as int)))
  from (values ('0'), ('1'), ('7'), ('30')) as wanted (days)
union all
select 'berth_entities', array[state, kind], count(*) from entity_findings
 where state in ('paused', 'missing')
    or (state in ('rebuilt', 'ended') and seen_at > clock_timestamp() - interval '1 hour')
 group by state, kind
union all
select 'berth_startup_tasks_open', '{{}}', count(*) from startup_tasks where ended_at is null
""")  # noqa: S608 - constants of ours
_AGE = text("select extract(epoch from clock_timestamp() - cast(:began_at as timestamptz))::float8")


async def count_fleet(session: AsyncSession) -> Sequence[tuple[str, list[str], float]]:
    """Returns metrics with their labels and values."""
    return [(name, labels, count) for name, labels, count in await session.execute(_COUNTS)]


async def seconds_since(session: AsyncSession, instant: datetime) -> float:
    """Returns the seconds since `instant` by PostgreSQL's clock."""
    return await session.scalar(_AGE, {"began_at": instant}) or 0.0
