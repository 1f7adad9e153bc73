-- Renews or ends the leases of a holder's broker connections.
--
-- KEYS[1] connections broker:budget:{owner}:connections
-- KEYS[2] holders     broker:budget:{owner}:holders
-- ARGV[1] holder
-- ARGV[2] lease in ms from now; 0: ended
-- ARGV[3…] connections
--
-- Leaves the connections of other holders alone; restores a missing one, whose data were lost.
-- Idempotent. Returns how many connections the owner has now.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for n = 3, #ARGV do
  local holder = redis.call('HGET', KEYS[2], ARGV[n])
  if not holder or holder == ARGV[1] then
    if ARGV[2] == '0' then
      redis.call('ZREM', KEYS[1], ARGV[n])
      redis.call('HDEL', KEYS[2], ARGV[n])
    else
      redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[n])
      redis.call('HSET', KEYS[2], ARGV[n], ARGV[1])
    end
  end
end
if ARGV[2] ~= '0' then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  redis.call('PEXPIRE', KEYS[2], ARGV[2])
end
return redis.call('ZCARD', KEYS[1])
