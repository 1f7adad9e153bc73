-- How runs end: shared by `finish` and `finish_and_claim`, and loaded before them, after `queue_lib.lua`.

-- Ends one run if the runner still holds it. The fencing number decides, together with the runner, because fencing
-- numbers start again when Valkey has lost its data. A repeat does nothing. If someone has cancelled the job, a
-- retry becomes its cancellation. For the arguments see `finish_all`.
local function finish(runner, retention, boost, id, fence, outcome, result, ttl, delay, crashed)
  local key = P .. 'job:' .. id
  local job = redis.call('HMGET', key, 'name', 'queue', 'attempt', 'unique', 'group', 'fence', 'state', 'node',
    'limited', 'runner')
  if job[6] ~= fence or job[7] ~= 'running' or job[10] ~= runner then return 'gone' end
  stop_holding(runner, id, job[2], job[1], job[8], job[9])
  if outcome == 'retry' and redis.call('HEXISTS', key, 'cancelled') == 1 then outcome = 'cancelled' end
  if outcome ~= 'retry' then
    end_job(outcome, id, job, result, ttl, retention)
    return outcome
  end
  local now, us = clock()
  local priority = redis.call('HGET', key, 'priority')
  local meta = redis.call('HMGET', META, 'sequence', 'boost:' .. job[2])
  local score = sequence(us, meta[1]) + delay * 1000 - priority * (meta[2] or boost) * 1000
  redis.call('HSET', key, 'score', score, 'due', now + delay, 'failure', result)
  redis.call('HINCRBY', key, 'crashes', crashed)
  publish_event('retry', id, job[1], job[2], job[3])
  enter_queue(id, now)
  return 'retry'
end

-- Ends all runs in ARGV, seven values each, from ARGV[first] on:
--   job id
--   fencing number of the claim
--   'done', 'failed', 'cancelled' or 'retry'
--   the result as JSON; for 'retry' that of this attempt
--   seconds that the result is kept
--   ms until a retry
--   1 if the job's process died or was killed, else 0
-- `retention`: seconds that a failed job is kept; `boost`: ms of waiting that one step of priority is worth,
-- unless the settings say otherwise.
-- Returns what became of each: 'done', 'failed', 'cancelled', 'retry', or 'gone' if the caller no longer holds it:
-- another runner took it over, or it has ended before.
local function finish_all(runner, retention, boost, first)
  local outcomes = {}
  for at = first, #ARGV, 7 do
    outcomes[#outcomes + 1] = finish(runner, retention, boost, unpack(ARGV, at, at + 6))
  end
  return outcomes
end
