-- Takes one launch, if the platform's rate allows it now, for all orchestrators together (GCRA).
--
-- KEYS[1] launches   berth:launches   string: when the launch after the last one is due at a steady rate (us)
-- ARGV[1] us between two launches in the long run
-- ARGV[2] launches at once, after a rest
--
-- Valkey's clock is the only one. A time that is due later than a whole burst was written before that clock
-- was set back, and must not delay launches.
-- Returns 0 if a launch was taken, else the us after which to ask again.
local time = redis.call('TIME')
local now, every, burst = time[1] * 1000000 + time[2], tonumber(ARGV[1]), tonumber(ARGV[2])
local due = tonumber(redis.call('GET', KEYS[1]) or '0')
if due > now + burst * every then due = now end
due = math.max(due, now) + every
local early = due - now - burst * every
if early > 0 then return early end
redis.call('SET', KEYS[1], string.format('%.0f', due), 'PX', math.ceil((due - now) / 1000) + 1)
return 0
