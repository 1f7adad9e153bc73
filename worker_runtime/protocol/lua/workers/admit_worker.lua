-- Takes a worker that announced itself into its pool, as free, or for the claim that it was launched for.
--
-- KEYS[1] worker     pool:{pool}:worker:<worker>
-- KEYS[2] ready      pool:{pool}:ready
-- KEYS[3] claim      pool:{pool}:claim:<claim>   (only used with a claim)
-- KEYS[4] born       pool:{pool}:born:<claim>    (only used with a claim)
-- ARGV[1] worker id
-- ARGV[2] claim id, or ''
-- ARGV[3] seconds that a claim is kept
--
-- Does nothing for a worker that has ended, or that the pool has already.
if redis.call('EXISTS', KEYS[1]) == 0 or redis.call('HEXISTS', KEYS[1], 'state') == 1 then return end
if ARGV[2] == '' then
  local time = redis.call('TIME')
  redis.call('HSET', KEYS[1], 'state', 'ready')
  redis.call('ZADD', KEYS[2], 'NX', time[1] * 1000 + math.floor(time[2] / 1000), ARGV[1])
else
  redis.call('HSET', KEYS[1], 'state', 'claimed', 'claim', ARGV[2])
  redis.call('SET', KEYS[3], ARGV[1], 'EX', ARGV[3])
  redis.call('RPUSH', KEYS[4], ARGV[1])
  redis.call('EXPIRE', KEYS[4], ARGV[3])
end
