-- Sets what a runner's job types declare: limits and rates. What an operator has set since stays.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV    field, value, field, value, …; '' for what is not declared (any more)
--
-- A field that still has the value of the declaration before follows the new one. Safe to repeat. Returns the number
-- of settings that have changed.
open(KEYS[1])
local changed = 0
for at = 1, #ARGV, 2 do
  local field, value = ARGV[at], ARGV[at + 1]
  local before = redis.call('HMGET', META, field, 'declared:' .. field)
  if before[1] == before[2] and (before[1] or '') ~= value then
    changed = changed + 1
    if value == '' then redis.call('HDEL', META, field) else redis.call('HSET', META, field, value) end
  end
  if value == '' then
    redis.call('HDEL', META, 'declared:' .. field)
  else
    redis.call('HSET', META, 'declared:' .. field, value)
  end
end
return changed
