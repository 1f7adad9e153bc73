-- Puts jobs on their queues, in their order: each once per job id, and once per unique key until the job has ended.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV[1…] fourteen values for each job:
--   job id
--   the job as JSON
--   name of the job's type; an own type with its version, 'shop/jobs.resize_image@2'
--   queue
--   priority, 0 to 9; higher runs earlier
--   1 if the job may be run again after its runner died, else 0
--   unique key, or ''
--   group, or '': jobs of a group run one after the other, in the order they are enqueued
--   delay, ms
--   ms of waiting that one step of priority is worth, unless the settings say otherwise
--   rate key, or '': jobs of a type with the same key share the rate of that type
--   receiver, or '': the server that the job has to wait for
--   ms for which the unique key counts at most; 0: until the job has ended
--   own type to which the job's failure is reported, or ''
--
-- The score is the time (µs, growing) less the priority's worth. A job that waits long enough overtakes a higher
-- priority, so nothing starves.
-- Returns two values for each job: 'queued' and its id, 'seen' and its id for a repeat, also of one that has ended, or
-- 'duplicate' and the id of the job that has the unique key.
--
-- Several jobs in one call share what costs more than a job itself: opening the script, the clock, the settings and
-- the rings. Send some tens at a time: the server does nothing else meanwhile.
open(KEYS[1])
local VALUES = 14
local now, us = clock()
local position -- of the last job of this call
local settings = {} -- queue → 'sequence', 'boost', 'pass'

local function settings_of(queue)
  local known = settings[queue]
  if not known then
    known = redis.call('HMGET', META, 'sequence', 'boost:' .. queue, 'pass:' .. queue)
    settings[queue] = known
  end
  return known
end

local function enqueue(id, body, name, queue, priority, idempotent, unique, group, delay, boost, rate, receiver,
    unique_for, on_failed)
  local key = P .. 'job:' .. id
  if redis.call('EXISTS', key, P .. 'result:' .. id) > 0 then return 'seen', id end
  if unique ~= '' then
    unique_for = tonumber(unique_for)
    local lock = {'SET', P .. 'unique:' .. unique, id, 'NX', unique_for > 0 and 'PX' or nil, unique_for}
    if not redis.call(unpack(lock, 1, unique_for > 0 and 6 or 4)) then
      return 'duplicate', redis.call('GET', P .. 'unique:' .. unique)
    end
  end
  delay = tonumber(delay)
  local meta = settings_of(queue)
  position = position and position + 1 or after(us, meta[1])
  local score = position + delay * 1000 - priority * (meta[2] or boost) * 1000
  local fields = {'body', body, 'name', name, 'queue', queue, 'priority', priority, 'idempotent', idempotent,
    'score', score, 'due', now + delay, 'queued_at', now, 'attempt', 0, 'crashes', 0, 'state', 'waiting'}
  local optional = {unique = unique, group = group, rate = rate, receiver = receiver, on_failed = on_failed}
  for field, value in pairs(optional) do
    if value ~= '' then
      fields[#fields + 1] = field
      fields[#fields + 1] = value
    end
  end
  redis.call('HSET', key, unpack(fields))
  if group ~= '' then
    local members = P .. 'group:' .. group
    redis.call('ZADD', members, position, id)
    if redis.call('ZRANGE', members, 0, 0)[1] ~= id then
      redis.call('HSET', key, 'state', 'grouped')
      return 'queued', id
    end
  end
  if delay > 0 then
    enter_queue(id, now)
  else
    push_job(id, queue, name, score, meta[3])
  end
  return 'queued', id
end

local replies = {}
for at = 1, #ARGV, VALUES do
  local outcome, job = enqueue(unpack(ARGV, at, at + VALUES - 1))
  replies[#replies + 1] = outcome
  replies[#replies + 1] = job
end
if position then redis.call('HSET', META, 'sequence', position) end
return replies
