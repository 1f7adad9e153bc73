-- Puts one request on a user's queue, once per request id.
--
-- KEYS[1] seen       trading:user:{user}:seen:<request>
-- KEYS[2] requests   trading:user:{user}:requests
-- KEYS[3] doorbell   trading:user:{user}:doorbell
-- KEYS[4] mark       worker:active:{user}
-- KEYS[5] client     trading:user:{user}:client:<client order id>; only for an order that has one
-- ARGV[1] request id (no '|')
-- ARGV[2] payload
-- ARGV[3] deadline, Unix ms by this server's clock
-- ARGV[4] ms that the id is remembered after the deadline
-- ARGV[5] MAC over user, request id, deadline and payload (no '|')
-- ARGV[6] the order's tag
-- ARGV[7] ms that KEYS[5] is remembered: longer than PostgreSQL may lack an order that it had
-- ARGV[8] thousandths of the server's memory beyond which nothing new is taken, or '': cancels and queries pass
--
-- The first order with a client order id wins, even if PostgreSQL lost it in a restore.
-- A request that was seen before also rings if any waits, because its ring may have gone to a frozen worker.
-- Returns {1 if enqueued or 0 if seen before, the item as queued, 1 if there is a mark, else 0}, {2, 'request id|tag'
-- of the first order, the same}, or {3, '', the same} if it was refused because memory is short: nothing was written.
local function ring()
  if redis.call('LLEN', KEYS[3]) == 0 then
    redis.call('LPUSH', KEYS[3], '1')
  end
end

local marked = redis.call('EXISTS', KEYS[4])
local known = redis.call('GETRANGE', KEYS[1], 0, 524287)  -- a worker may write it
if known ~= '' then
  if redis.call('EXISTS', KEYS[2]) == 1 then ring() end
  return {0, known, marked}
end
if is_memory_used(ARGV[8]) and not (KEYS[5] and redis.call('EXISTS', KEYS[5]) == 1) then return {3, '', marked} end
if KEYS[5] then
  local first = redis.call('SET', KEYS[5], ARGV[1] .. '|' .. ARGV[6], 'NX', 'GET', 'PX', ARGV[7])
  if first and first ~= ARGV[1] .. '|' .. ARGV[6] then return {2, first, marked} end
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- Joined, not formatted: Lua 5.1's %s ends at the first NUL byte.
local item = ARGV[3] .. '|' .. ARGV[1] .. '|' .. ARGV[5] .. '|' .. ARGV[2]
redis.call('SET', KEYS[1], item, 'PX', string.format('%d', math.max(0, ARGV[3] - now) + ARGV[4]))
redis.call('LPUSH', KEYS[2], item)
ring()
return {1, item, marked}
