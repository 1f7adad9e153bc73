-- Cancels a job: at once if it waits, through its runner if it runs.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV[1] job id
-- ARGV[2] the result of a cancelled job
-- ARGV[3] seconds that the result is kept
--
-- Safe to repeat. Returns 'cancelled'; 'asked' (its runner is asked to kill it); 'failed' (it had failed, and is
-- forgotten now); 'unknown' (no such job, or it has ended).
open(KEYS[1])
local id = ARGV[1]
local key = P .. 'job:' .. id
local job = redis.call('HMGET', key, 'name', 'queue', 'attempt', 'unique', 'group', 'state',
  'runner', 'fence', 'receiver')
local state = job[6]
if not state then return 'unknown' end
if state == 'running' then
  redis.call('HSET', key, 'cancelled', 1)
  send_mail(job[7], 'cancel ' .. job[8] .. ' ' .. id)
  return 'asked'
end
if state == 'failed' then
  redis.call('ZREM', P .. 'failed', id)
  redis.call('DEL', key)
  redis.call('SET', P .. 'result:' .. id, ARGV[2], 'EX', ARGV[3])
  return 'failed'
end
if state == 'waiting' then
  redis.call('ZREM', P .. 'subqueue:' .. job[2] .. ':' .. job[1], id)
  if job[9] then redis.call('ZREM', P .. 'parked:' .. job[2] .. ' ' .. job[9], id) end
  update_subqueue(job[2], job[1])
elseif state == 'delayed' then
  redis.call('ZREM', P .. 'delayed', id)
end
end_job('cancelled', id, job, ARGV[2], ARGV[3], 0)
return 'cancelled'
