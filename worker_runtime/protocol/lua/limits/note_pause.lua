-- Notes that the broker has asked for a pause of a person: until its end nobody takes a connection of theirs or
-- spends a call.
--
-- KEYS[1] since      broker:budget:{owner}:since
-- ARGV[1] ms of the first pause
-- ARGV[2] ms of the longest pause
-- ARGV[3] ms after the end of a pause within which the next one is twice as long
--
-- It outlives the worker that met it. During a pause it changes nothing: two accounts of a person meet the same
-- one. Returns the ms that are left of the pause.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local first, longest = math.min(tonumber(ARGV[1]), 3600000), math.min(tonumber(ARGV[2]), 3600000)
local known = redis.call('HMGET', KEYS[1], 'quiet_until', 'quiet_ms')
local paused_until, pause = tonumber(known[1] or '0'), tonumber(known[2] or '0')
if paused_until > now then return paused_until - now end
if pause > 0 and now < paused_until + ARGV[3] then
  pause = math.min(math.max(2 * pause, first), longest)
else
  pause = math.min(first, longest)
end
redis.call('HSET', KEYS[1], 'quiet_until', now + pause, 'quiet_ms', pause)
redis.call('PEXPIRE', KEYS[1], 40 * 86400000)
return pause
