-- Puts one request on a user's queue, once per request id.
--
-- KEYS[1] seen       trading:user:{user}:seen:<request>
-- KEYS[2] requests   trading:user:{user}:requests
-- KEYS[3] doorbell   trading:user:{user}:doorbell
-- KEYS[4] mark       worker:active:{user}
-- ARGV[1] request id (no '|')
-- ARGV[2] payload
-- ARGV[3] time to live, ms: the deadline is this far from now, by this server's clock
-- ARGV[4] ms that the id is remembered after the deadline
--
-- A request that was seen before also rings if any waits, because its ring may have gone to a frozen worker.
-- Returns {1 if enqueued or 0 if seen before, the item as queued, the mark or ''}.
local function ring()
  if redis.call('LLEN', KEYS[3]) == 0 then
    redis.call('LPUSH', KEYS[3], '1')
  end
end

local mark = redis.call('GET', KEYS[4]) or ''
local known = redis.call('GET', KEYS[1])
if known then
  if redis.call('EXISTS', KEYS[2]) == 1 then ring() end
  return {0, known, mark}
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- Joined, not formatted: Lua 5.1's %s ends at the first NUL byte.
local item = string.format('%d', now + ARGV[3]) .. '|' .. ARGV[1] .. '|' .. ARGV[2]
redis.call('SET', KEYS[1], item, 'PX', ARGV[3] + ARGV[4])
redis.call('LPUSH', KEYS[2], item)
ring()
return {1, item, mark}
