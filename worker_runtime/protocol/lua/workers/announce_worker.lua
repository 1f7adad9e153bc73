-- Announces a pool worker as alive, and as free unless it was claimed. Called every few seconds.
--
-- KEYS[1] worker     pool:{pool}:worker:<worker>
-- KEYS[2] ready      pool:{pool}:ready
-- KEYS[3] claim      pool:{pool}:claim:<claim>   (only used with a reservation)
-- KEYS[4] born       pool:{pool}:born:<claim>    (only used with a reservation)
-- ARGV[1] worker id
-- ARGV[2] time to live, ms
-- ARGV[3] claim id this worker was launched for, or ''
-- ARGV[4] seconds that a claim is kept
-- ARGV[5…] field, value… : public_key, proof, task, version
--
-- Returns the worker's state: 'ready', 'claimed', 'confirmed' or 'released'.
local state = redis.call('HGET', KEYS[1], 'state')
redis.call('HSET', KEYS[1], unpack(ARGV, 5))
if not state then
  if ARGV[3] == '' then
    state = 'ready'
    redis.call('HSET', KEYS[1], 'state', state)
  else
    state = 'claimed'
    redis.call('HSET', KEYS[1], 'state', state, 'claim', ARGV[3])
    redis.call('SET', KEYS[3], ARGV[1], 'EX', ARGV[4])
    redis.call('RPUSH', KEYS[4], ARGV[1])
    redis.call('EXPIRE', KEYS[4], ARGV[4])
  end
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
if state == 'ready' then
  local time = redis.call('TIME')
  redis.call('ZADD', KEYS[2], 'NX', time[1] * 1000 + math.floor(time[2] / 1000), ARGV[1])
end
return state
