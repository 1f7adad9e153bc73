-- Gives back jobs that have not started, as if they had not been claimed: with the score they had, no attempt
-- counted, and their queue's turn not taken.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV[1] runner
-- ARGV[2…] job id and fencing number of its claim, for each job
--
-- Safe to repeat. Returns for each 'returned'; 'cancelled' if someone has cancelled it (the runner still holds it,
-- and ends it); or 'gone' if the caller no longer holds it.
open(KEYS[1])
local now = clock()
local fates = {}
for at = 2, #ARGV, 2 do
  local id = ARGV[at]
  local key = P .. 'job:' .. id
  local job = redis.call('HMGET', key, 'name', 'queue', 'node', 'limited', 'fence', 'state', 'runner', 'cancelled')
  local fate = 'returned'
  if job[5] ~= ARGV[at + 1] or job[6] ~= 'running' or job[7] ~= ARGV[1] then
    fate = 'gone'
  elseif job[8] then
    fate = 'cancelled'
  else
    stop_holding(ARGV[1], id, job[2], job[1], job[3], job[4])
    redis.call('HINCRBY', key, 'attempt', -1)
    local turn = -1 / (redis.call('HGET', META, 'weight:' .. job[2]) or 1)
    if turn == -math.huge then turn = 0 end -- a weight of 0: the queue comes last anyway
    if redis.call('ZSCORE', P .. 'ready', job[2]) then
      redis.call('ZINCRBY', P .. 'ready', turn, job[2])
    else
      -- Not HINCRBYFLOAT: it refuses infinity, which a weight of 0 gives.
      local pass = 'pass:' .. job[2]
      redis.call('HSET', META, pass, (redis.call('HGET', META, pass) or 0) + turn)
    end
    enter_queue_now(id, now)
  end
  fates[#fates + 1] = fate
end
write_counts()
return fates
