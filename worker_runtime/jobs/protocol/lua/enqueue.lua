-- Puts one job on a queue, once per job id, and once per unique key until the job has ended.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV[1] job id
-- ARGV[2] the job as JSON
-- ARGV[3] name of the job's type; an own type with its version, 'shop/jobs.resize_image@2'
-- ARGV[4] queue
-- ARGV[5] priority, 0 to 9; higher runs earlier
-- ARGV[6] 1 if the job may be run again after its runner died, else 0
-- ARGV[7] unique key, or ''
-- ARGV[8] group, or '': jobs of a group run one after the other, in the order they are enqueued
-- ARGV[9] delay, ms
-- ARGV[10] ms of waiting that one step of priority is worth, unless the settings say otherwise
-- ARGV[11] rate key, or '': jobs of a type with the same key share the rate of that type
-- ARGV[12] receiver, or '': the server that the job has to wait for
-- ARGV[13] ms for which the unique key counts at most; 0: until the job has ended
-- ARGV[14] own type to which the job's failure is reported, or ''
--
-- The score is the time (µs, growing) less the priority's worth. A job that waits long enough overtakes a higher
-- priority, so nothing starves.
-- Returns {'queued', id}, {'seen', id} for a repeat, also of one that has ended, or {'duplicate', id of the job that has
-- the key}.
open(KEYS[1])
local id, queue, delay = ARGV[1], ARGV[4], tonumber(ARGV[9])
local key = P .. 'job:' .. id
if redis.call('EXISTS', key, P .. 'result:' .. id) > 0 then return {'seen', id} end
local unique_for = tonumber(ARGV[13] or 0)
local lock = {'SET', P .. 'unique:' .. ARGV[7], id, 'NX', unique_for > 0 and 'PX' or nil, unique_for}
if ARGV[7] ~= '' and not redis.call(unpack(lock, 1, unique_for > 0 and 6 or 4)) then
  return {'duplicate', redis.call('GET', P .. 'unique:' .. ARGV[7])}
end
local now, us = clock()
local meta = redis.call('HMGET', META, 'sequence', 'boost:' .. queue, 'pass:' .. queue)
local position = sequence(us, meta[1])
local score = position + delay * 1000 - ARGV[5] * (meta[2] or ARGV[10]) * 1000
local fields = {'body', ARGV[2], 'name', ARGV[3], 'queue', queue, 'priority', ARGV[5], 'idempotent', ARGV[6],
  'score', score, 'due', now + delay, 'queued_at', now, 'attempt', 0, 'crashes', 0, 'state', 'waiting'}
local optional = {unique = ARGV[7], group = ARGV[8], rate = ARGV[11], receiver = ARGV[12] or '', on_failed = ARGV[14] or ''}
for field, value in pairs(optional) do
  if value ~= '' then
    fields[#fields + 1] = field
    fields[#fields + 1] = value
  end
end
redis.call('HSET', key, unpack(fields))
if ARGV[8] ~= '' then
  local members = P .. 'group:' .. ARGV[8]
  redis.call('ZADD', members, position, id)
  if redis.call('ZRANGE', members, 0, 0)[1] ~= id then
    redis.call('HSET', key, 'state', 'grouped')
    return {'queued', id}
  end
end
if delay > 0 then
  enter_queue(id, now)
else
  push_job(id, queue, ARGV[3], score, meta[3])
end
return {'queued', id}
