-- Changes settings that a claim heeds: limits, rates, weights. They hold from the next claim on. Running jobs
-- go on, and jobs that were given a time by a rate keep it.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV    field, value, field, value, …; '' for a value takes the setting back
--
-- Runners are told to look: one that waits, because a limit left no room, may go on. Safe to repeat. Returns how
-- many settings are different now.
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
for _, runner in ipairs(redis.call('HKEYS', P .. 'beats')) do
  redis.call('LPUSH', P .. 'mail:' .. runner, 'look')
  redis.call('EXPIRE', P .. 'mail:' .. runner, 3600)
end
return changed
