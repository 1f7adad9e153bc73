-- Puts a user into the pool's wait queue and returns their position in it. Called while the pool may not grow.
--
-- KEYS[1] wait queue pool:{pool}:line     zset: user → since when they wait (ms)
-- KEYS[2] asked      pool:{pool}:asked    zset: user → when they asked last (ms)
-- ARGV[1] user
-- ARGV[2] ms after which a user who does not ask again leaves the wait queue
--
-- A user who asks again keeps their position. Returns the position; 0 is the first.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, user in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[2])) do
  redis.call('ZREM', KEYS[1], user)
  redis.call('ZREM', KEYS[2], user)
end
-- Users who come within a millisecond keep the order in which they came.
local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')
local since = math.max(now, last[2] and tonumber(last[2]) + 1 or 0)
redis.call('ZADD', KEYS[1], 'NX', since, ARGV[1])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return redis.call('ZRANK', KEYS[1], ARGV[1])
