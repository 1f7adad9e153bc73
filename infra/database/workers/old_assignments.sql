-- By indexes and in bounds, since it belongs to each pass of maintenance: as one look at all rows it took minutes
-- with a million assignments, and no pass ended.
with gone as (
  delete from worker_sessions where claim_id = any(array(
    select claim_id from worker_sessions s
     where s.ended_at < now() - make_interval(days => :days)
       and exists (select from worker_sessions l where l.user_id = s.user_id and l.epoch > s.epoch)
       and not exists (
             select from worker_sessions e
              where e.user_id = s.user_id and e.epoch <= s.epoch and (e.worker_id = any(cast(:running as text[]))
                    or coalesce(e.ended_at, 'infinity') >= now() - make_interval(days => :days)))
     order by s.ended_at limit :rows))
  returning worker_id
)
delete from worker_launches where worker_id = any(array(
  select worker_id from gone
  union all
  (select l.worker_id from worker_launches l
    where l.launched_at < now() - make_interval(days => :days) and l.worker_id <> all(cast(:running as text[]))
      and not exists (select from worker_sessions s where s.worker_id = l.worker_id)
    order by l.launched_at limit :rows)))
