-- Spends calls of one owner (a person, an egress address), all windows or none.
--
-- KEYS[1] since      broker:budget:{owner}:since   since when its calls are counted
-- KEYS[2…] windows   broker:budget:{owner}:<what>  one zset each: call → when (ms)
-- ARGV[1] id of the call: a repeat of a granted call is granted again and counted once
-- ARGV[2] the count that the caller knows (third of the reply to an earlier call that was granted), '' if none
-- ARGV[3] '1': as far as the caller knows, this owner has never made a call; then ARGV[2] is ''
-- ARGV[4] when the broker's day begins, in ms after midnight UTC
-- then for each window: how many calls this is in it, its span in ms (0: the broker's day), its limit, its limit
--                       for the rest of a day whose count was lost
--
-- Only Valkey's clock counts. A missing count was lost, unless ARGV[3] says that there never was one: then the
-- new count is whole, until a caller comes who knows another. A caller who does not know a count that is not
-- whole waits until it is as old as the span, when calls from before its beginning are out of the window. So a
-- lost count is a spent one for one window. A day is too long to wait for: its rest has a limit of its own.
-- Nothing is spent during a pause that the broker has asked for (note_pause.lua).
-- Returns {granted (1, 0), ms until it is worth asking again, the count's id, permille of the fullest window that
-- are in use now}.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- A worker chooses its numbers, and nobody else is served meanwhile: 50,000 entries take 20 ms.
local MAX_CALLS = 1000  -- calls of one message to the broker, in one window
local DAY, KEPT = 86400000, 40 * 86400000
local begins = tonumber(ARGV[4])
local today = math.floor((now - begins) / DAY) * DAY + begins

local count = redis.call('HMGET', KEYS[1], 'id', 'born', 'whole', 'quiet_until')
local id, born, whole = count[1], tonumber(count[2] or ''), count[3]
if not id then
  id, born, whole = time[1] .. '-' .. time[2], now, ARGV[3]
  redis.call('HSET', KEYS[1], 'id', id, 'born', born, 'whole', whole)
end
redis.call('PEXPIRE', KEYS[1], KEPT)
if whole == '1' and ARGV[2] ~= '' and ARGV[2] ~= id then
  whole = '0'
  redis.call('HSET', KEYS[1], 'whole', whole)
end
local known = whole == '1' or ARGV[2] == id
local paused_until = tonumber(count[4] or '0')
if paused_until > now then return {0, paused_until - now, id, 1000} end

local wait, free, used = 0, {}, 0
for n = 2, #KEYS do
  local at = 4 * n - 3
  local cost, span, limit = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  if not (cost and cost <= MAX_CALLS) then  -- or no number
    return redis.error_reply('ERR more calls at once than there are')
  end
  local over = span > 0 and now - span or today - 1
  redis.call('ZREMRANGEBYSCORE', KEYS[n], '-inf', over)
  if not redis.call('ZSCORE', KEYS[n], ARGV[1] .. ':1') then
    free[#free + 1] = n
    if span == 0 and whole ~= '1' and born > today then limit = math.min(limit, tonumber(ARGV[at + 3])) end
    local excess = redis.call('ZCARD', KEYS[n]) + cost - limit
    used = math.max(used, (excess + limit) * 1000 / limit)
    if span == 0 then
      if excess > 0 then wait = math.max(wait, today + DAY - now) end
    else
      if not known then wait = math.max(wait, born + span - now) end
      if cost > limit then
        wait = math.max(wait, span)
      elseif excess > 0 then
        local leaves = redis.call('ZRANGE', KEYS[n], excess - 1, excess - 1, 'WITHSCORES')
        wait = math.max(wait, tonumber(leaves[2]) + span - now)
      end
    end
  end
end
if wait > 0 then return {0, wait, id, 1000} end
for _, n in ipairs(free) do
  local cost, span = tonumber(ARGV[4 * n - 3]), tonumber(ARGV[4 * n - 2])
  for call = 1, cost do redis.call('ZADD', KEYS[n], now, ARGV[1] .. ':' .. call) end
  redis.call('PEXPIRE', KEYS[n], span > 0 and span or DAY)
end
return {1, 0, id, math.floor(used)}
