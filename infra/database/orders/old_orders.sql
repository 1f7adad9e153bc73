-- Fills explain positions: those of deleted orders stay as shares that were held before.
with old as materialized (
  select id, user_id, account_id, symbol, filled_quantity * case side when 'buy' then 1 else -1 end
         * case when right(lot, 3) = 'odd' then 1 else 1000 end as shares
    from orders where created_at < :before and state in (ENDED) and attention is null
   limit :rows for update skip locked
), events as (
  delete from order_events where order_id in (select id from old)
), sums as (
  select user_id, account_id, symbol, sum(shares) as shares from old group by 1, 2, 3 having sum(shares) <> 0
), held as (
  insert into reconciliations (user_id, account_id, epoch, differences, blocks, resolved_at, resolved_by)
  select user_id, account_id, 0, jsonb_build_object('odd_shares', jsonb_agg(jsonb_build_object(
           'symbol', symbol, 'ours', 0, 'broker', shares))), false, now(), 'first comparison'
    from sums
   where (user_id, account_id) in (
           select user_id, account_id from reconciliations where resolved_by = 'first comparison')
   group by 1, 2
)
delete from orders where id in (select id from old)
