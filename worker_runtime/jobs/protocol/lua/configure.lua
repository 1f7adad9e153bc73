-- Changes settings that a claim reads: limits, rates, weights, suspensions. They hold from the next claim on.
-- Running jobs continue, and jobs that were given a time by a rate keep it.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV    field, value, field, value, …; an empty value removes the setting
--
-- All runners get a message: one that waits for a limit may continue now, one that is suspended stops claiming.
-- Safe to repeat. Returns the number of settings that have changed.
open(KEYS[1])
local changed = 0
for i = 1, #ARGV, 2 do
  local before = redis.call('HGET', META, ARGV[i]) or ''
  if before ~= ARGV[i + 1] then
    changed = changed + 1
    if ARGV[i + 1] == '' then
      redis.call('HDEL', META, ARGV[i])
    else
      redis.call('HSET', META, ARGV[i], ARGV[i + 1])
    end
  end
end
for _, runner in ipairs(redis.call('HKEYS', P .. 'beats')) do send_mail(runner, 'check') end
return changed
