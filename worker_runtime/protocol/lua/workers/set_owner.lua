-- Makes a worker the owner of a user. Only the orchestrator calls it.
--
-- KEYS[1] owner      worker:owner:{user}
-- KEYS[2] switch     trading:switch:{user}
-- ARGV[1] epoch
-- ARGV[2] worker id
-- ARGV[3] generation of Valkey
-- ARGV[4] version of the switch, ARGV[5]… its fields and states, as in write_switch.lua
--
-- Writes the switch with the owner, so that none is missing where there is an owner; a newer one stays.
-- Returns 'ok', or 'older' if a later epoch (or another worker of this one) owns the user already.
for _, key in ipairs(KEYS) do
  if redis.call('TYPE', key).ok ~= 'hash' then redis.call('DEL', key) end
end
local owner = redis.call('HMGET', KEYS[1], 'epoch', 'worker')
if owner[1] then
  local current_epoch, new_epoch = tonumber(owner[1]), tonumber(ARGV[1])
  if current_epoch > new_epoch then return 'older' end
  if current_epoch == new_epoch and owner[2] ~= ARGV[2] then return 'older' end
end
local version = tonumber(redis.call('HGET', KEYS[2], '*version') or '')
if not version or version <= tonumber(ARGV[4]) then
  redis.call('DEL', KEYS[2])
  redis.call('HSET', KEYS[2], '*version', ARGV[4])
  -- One by one: `unpack` fails beyond 8,000 words.
  for at = 5, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[at], ARGV[at + 1]) end
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'worker', ARGV[2], 'generation', ARGV[3])
return 'ok'
