-- Takes one of a person's broker connections, as a lease that ends by itself. Called before the login.
--
-- KEYS[1] since       broker:budget:{owner}:since
-- KEYS[2] connections broker:budget:{owner}:connections  zset: connection → end of its lease (ms)
-- KEYS[3] holders     broker:budget:{owner}:holders      hash: connection → who has it
-- ARGV[1] connection
-- ARGV[2] holder
-- ARGV[3] lease in ms
-- ARGV[4] how many there are
-- ARGV[5] ms that all holders need to come back after a loss of data
-- ARGV[6] the count that the caller knows, as in spend_budget.lua
-- ARGV[7] '1': as far as the caller knows, this owner has never made a call, as in spend_budget.lua
--
-- None is taken during a pause that the broker has asked for (note_pause.lua).
-- A connection that another holder has goes over to the new one: the caller names it by user and account, and
-- a user has one owner at a time. Idempotent. Returns as spend_budget.lua does.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local count = redis.call('HMGET', KEYS[1], 'id', 'born', 'whole', 'quiet_until')
local id, born, whole = count[1], tonumber(count[2] or ''), count[3]
if not id then
  id, born, whole = time[1] .. '-' .. time[2], now, ARGV[7]
  redis.call('HSET', KEYS[1], 'id', id, 'born', born, 'whole', whole)
end
if whole == '1' and ARGV[6] ~= '' and ARGV[6] ~= id then
  whole = '0'
  redis.call('HSET', KEYS[1], 'whole', whole)
end
redis.call('PEXPIRE', KEYS[1], 40 * 86400000)

for _, ended in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  redis.call('ZREM', KEYS[2], ended)
  redis.call('HDEL', KEYS[3], ended)
end
local paused_until = tonumber(count[4] or '0')
if paused_until > now then return {0, paused_until - now, id} end
if not redis.call('ZSCORE', KEYS[2], ARGV[1]) then
  if whole ~= '1' and ARGV[6] ~= id and now < born + ARGV[5] then return {0, born + ARGV[5] - now, id} end
  if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[4]) then
    local first = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
    return {0, first[2] and tonumber(first[2]) - now or tonumber(ARGV[3]), id}
  end
end
redis.call('ZADD', KEYS[2], now + ARGV[3], ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[3], ARGV[3])
return {1, 0, id}
