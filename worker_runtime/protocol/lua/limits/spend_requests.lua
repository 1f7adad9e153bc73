-- Notes requests that one API process has let through, and tells how far each limit is used up (GCRA).
--
-- KEYS[n] limit   berth:limit:{requests}:<kind>:<subject>   string: when the requests so far are paid for (us)
-- ARGV, three for each limit: us that one request pays for, requests let through, the most at once (us)
--
-- Valkey's clock is the only one. A time that is more than two bursts ahead was written before that clock was
-- set back.
-- Returns for each limit the us until its requests are paid for; 0: nothing is used up.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local unpaid = {}
for n, limit in ipairs(KEYS) do
  local every, count, burst = tonumber(ARGV[3 * n - 2]), tonumber(ARGV[3 * n - 1]), tonumber(ARGV[3 * n])
  local paid = tonumber(redis.call('GET', limit) or '0')
  if paid > now + 2 * burst then paid = now + 2 * burst end
  paid = math.max(paid, now) + every * count
  redis.call('SET', limit, string.format('%.0f', paid), 'PX', math.ceil((paid - now) / 1000) + 1)
  unpaid[n] = paid - now
end
return unpaid
