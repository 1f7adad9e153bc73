-- Takes a dead runner's jobs back, or the caller's own when it signs off.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV[1] the runner
-- ARGV[2] its beat, which has not changed for a whole lease; '' for the caller's own jobs
-- ARGV[3] 1 if this counts as a crash of its jobs, else 0
-- ARGV[4] crashes after which a job is not run again
-- ARGV[5] seconds that a result is kept
-- ARGV[6] seconds that a failed job is kept
--
-- An idempotent job goes back with the score it had, so it comes first in its priority. Nobody knows whether any
-- other job has done its work: it ends as failed, with the code JOB_OUTCOME_UNKNOWN.
-- Safe to repeat. Returns {'alive'} if the runner has beaten since, else {'reaped', job, outcome, …} with
-- 'returned', 'failed' or 'cancelled' for each.
open(KEYS[1])
local beat = redis.call('HGET', P .. 'beats', ARGV[1])
if ARGV[2] ~= '' and beat and beat ~= ARGV[2] then return {'alive'} end
redis.call('HDEL', P .. 'beats', ARGV[1])
redis.call('DEL', P .. 'runner:' .. ARGV[1], P .. 'mailbox:' .. ARGV[1])
local now = clock()
local reply = {'reaped'}

local function end_lost_job(id, job, status, code, detail)
  local result = cjson.encode({type = 'job_result', v = 1, job_id = id, status = status,
    failure = {code = code, detail = detail}, attempt = tonumber(job[3]), runner = ARGV[1],
    finished_at_ms = now})
  end_job(status, id, job, result, ARGV[5], ARGV[6])
  return status
end

for _, id in ipairs(redis.call('SMEMBERS', P .. 'held:' .. ARGV[1])) do
  local key = P .. 'job:' .. id
  local job = redis.call('HMGET', key, 'name', 'queue', 'attempt', 'unique', 'group', 'node', 'idempotent',
    'cancelled', 'runner', 'limited')
  if job[1] and job[9] == ARGV[1] then
    stop_holding(ARGV[1], id, job[2], job[1], job[6], job[10])
    local crashes = redis.call('HINCRBY', key, 'crashes', ARGV[3])
    local outcome = 'returned'
    if job[8] then
      outcome = end_lost_job(id, job, 'cancelled', 'JOB_CANCELLED', 'cancelled, then its runner died')
    elseif job[7] ~= '1' then
      outcome = end_lost_job(id, job, 'failed', 'JOB_OUTCOME_UNKNOWN', 'its runner died while it ran')
    elseif crashes >= tonumber(ARGV[4]) then
      outcome = end_lost_job(id, job, 'failed', 'JOB_CRASHED', 'it or its runner died ' .. crashes .. ' times')
    else
      publish_event(outcome, id, job[1], job[2], job[3])
      enter_queue_now(id, now)
    end
    reply[#reply + 1] = id
    reply[#reply + 1] = outcome
  end
end
redis.call('DEL', P .. 'held:' .. ARGV[1])
write_counts()
return reply
