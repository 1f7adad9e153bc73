-- The figures of a time as one JSON document, for `reports.py`, which may put a condition on user_id wherever
-- "of whom" stands in a comment.
with placed as materialized (
  select id, user_id, side, created_at, reason_code, case when right(lot, 3) = 'odd' then 0 else quantity end as lots,
         case when right(lot, 3) = 'odd' then 0 else filled_quantity end as filled_lots,
         case when attention is not null and state = any(:open)
              then 'needs_attention' else state end as state
    from orders where created_at >= :since and created_at < :until /* of whom */
), claims as materialized (
  select * from worker_sessions where assigned_at >= :since and assigned_at < :until /* of whom */
), happened as (
  select placed.created_at as accepted, bool_or(e.state = 'needs_attention') as raised,
         min(e.at) filter (where e.state in ('submitted', 'part_filled', 'filled')) as submitted,
         min(e.at) filter (where e.state = any(:final)) as final
    from placed join order_events e on e.order_id = placed.id group by placed.id, placed.created_at
), waits as (
  select 'accepted_to_submitted' as name, submitted - accepted as lasted from happened
  union all
  select 'submitted_to_final', final - submitted from happened
  union all
  select case when warm then 'claim_warm' else 'claim_cold' end, claimed_at - assigned_at from claims
), spreads as (
  select name, count(*) as count, max(seconds) as max,
         percentile_cont(array[0.5, 0.95, 0.99]) within group (order by seconds) as p
    from (select name, cast(greatest(extract(epoch from lasted), 0) as float8) as seconds from waits
           where lasted is not null) as measured group by name
), codes as (
  select 'by_state' as kind, state as name, count(*) as count from placed group by 2
  union all
  select 'by_code', reason_code, count(*) from placed where reason_code is not null group by 2
  union all
  select 'dead_letters', kind, count(*) from dead_letters
   where first_at >= :since and first_at < :until /* of whom */ group by 2
), counts as (
  select kind, jsonb_object_agg(name, count) as counted from codes group by kind
)
select jsonb_build_object(
  'users', (select count(distinct user_id) from placed),
  'users_with_worker', (select count(distinct user_id) from claims where worker_id is not null),
  'orders', (select count(*) from placed),
  'lots_ordered', (select coalesce(sum(lots), 0) from placed),
  'lots_bought', (select coalesce(sum(filled_lots), 0) from placed where side = 'buy'),
  'lots_sold', (select coalesce(sum(filled_lots), 0) from placed where side = 'sell'),
  'claims_failed', (select count(*) from claims where worker_id is null and ended_at is not null),
  'restarts', (select count(*) from worker_sessions
                where crashed and ended_at >= :since and ended_at < :until /* of whom */),
  'attention_raised', (select count(*) from happened where raised),
  'differences', (select count(*) from reconciliations where at >= :since and at < :until
                     and resolved_by is distinct from :first_comparison /* of whom */),
  'seconds', coalesce((select jsonb_object_agg(name, jsonb_build_object('count', count, 'p50', p[1],
                              'p95', p[2], 'p99', p[3], 'max', max)) from spreads), '{}')
) || coalesce((select jsonb_object_agg(kind, counted) from counts), '{}')
