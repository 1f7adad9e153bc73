-- Renews a runner's lease: one beat, however many jobs it holds. Also moves due jobs into their queues.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV[1] runner
-- ARGV[2] state: 'started', 'idle', 'busy' or 'suspended'
-- ARGV[3] seconds the entry lives without a renewal
-- ARGV[4] running jobs, comma separated
-- ARGV[5] ms that failed jobs are kept
-- ARGV[6] number of this batch of counts, growing: a repeat is not added again
-- ARGV[7] the counts, as JSON of numbers by field; '' for none
--
-- Returns {'ok', 'running' or 'suspended', ms until a delayed job is due or -1, runner, beat, runner,
-- beat, …} with the beats of all, or {'lost'} if the runner is not registered (reaped, or data was lost).
open(KEYS[1])
if redis.call('HEXISTS', P .. 'beats', ARGV[1]) == 0 then return {'lost'} end
local runner = P .. 'runner:' .. ARGV[1]
local name = redis.call('HGET', runner, 'name')
if not name then return {'lost'} end -- its entry has expired: it has to join again
local now = clock()
redis.call('HINCRBY', P .. 'beats', ARGV[1], 1)
redis.call('HSET', runner, 'state', ARGV[2], 'jobs', ARGV[4], 'seen_at', now)
redis.call('EXPIRE', runner, ARGV[3])
if ARGV[7] ~= '' and redis.call('HGET', runner, 'counted') ~= ARGV[6] then
  for field, number in pairs(cjson.decode(ARGV[7])) do
    redis.call('HINCRBY', P .. 'totals', field, string.format('%.0f', number))
  end
  redis.call('HSET', runner, 'counted', ARGV[6])
end
redis.call('ZREMRANGEBYSCORE', P .. 'failed', '-inf', now - ARGV[5])
local halted = redis.call('HMGET', META, 'halt', 'halt_runner:' .. name)
local reply = {'ok', (halted[1] or halted[2]) and 'suspended' or 'running', promote(now)}
for _, part in ipairs(redis.call('HGETALL', P .. 'beats')) do reply[#reply + 1] = part end
return reply
