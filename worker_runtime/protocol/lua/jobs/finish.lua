-- Ends one run of a job, if the caller still has it: the fencing number decides.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV[1] runner
-- ARGV[2] job id
-- ARGV[3] fencing number of the claim
-- ARGV[4] 'done', 'failed', 'cancelled' or 'retry'
-- ARGV[5] the result, as those read it who wait for it ('retry': of this attempt)
-- ARGV[6] seconds that the result is kept
-- ARGV[7] seconds that a failed job is kept
-- ARGV[8] ms until a retry
-- ARGV[9] 1 if the job's process died or was killed, else 0
-- ARGV[10] ms of waiting that one step of priority is worth, unless the settings say otherwise
--
-- A repeat does nothing. A retry of a job that someone cancelled meanwhile ends as cancelled.
-- Returns what became of it ('done', 'failed', 'cancelled', 'retry'), or 'gone' if this run is no longer
-- the caller's: taken over, or ended before.
open(KEYS[1])
local id = ARGV[2]
local key = P .. 'job:' .. id
local job = redis.call('HMGET', key, 'name', 'queue', 'attempt', 'unique', 'group', 'fence', 'state', 'node',
  'cancelled', 'limited')
if job[6] ~= ARGV[3] or job[7] ~= 'running' then return 'gone' end
let_go(ARGV[1], id, job[2], job[1], job[8], job[10])
local outcome = ARGV[4]
if outcome == 'retry' and job[9] then outcome = 'cancelled' end
if outcome ~= 'retry' then
  conclude(outcome, id, job, ARGV[5], ARGV[6], ARGV[7])
  return outcome
end
local now, us = clock()
local priority = redis.call('HGET', key, 'priority')
local meta = redis.call('HMGET', META, 'sequence', 'boost:' .. job[2])
local score = sequence(us, meta[1]) + ARGV[8] * 1000 - priority * (meta[2] or ARGV[10]) * 1000
redis.call('HSET', key, 'score', score, 'due', now + ARGV[8], 'failure', ARGV[5])
redis.call('HINCRBY', key, 'crashes', ARGV[9])
tell('retry', id, job[1], job[2], job[3])
place(id, now)
return 'retry'
