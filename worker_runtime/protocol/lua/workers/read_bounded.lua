-- Reads what workers write, however large they made it.
--
-- KEYS     keys of one kind
-- ARGV[1]  the kind, 'string' or 'hash'
--
-- Returns for each key the first 256 bytes of a string, or fields and values of a hash in turn; false for no
-- key, for one of another kind, and for a hash of more than 64 fields or 16 KiB.
local found = {}
for i, key in ipairs(KEYS) do
  found[i] = false
  if redis.call('TYPE', key).ok ~= ARGV[1] then
  elseif ARGV[1] == 'string' then
    found[i] = redis.call('GETRANGE', key, 0, 255)
  elseif redis.call('HLEN', key) <= 64 and redis.call('MEMORY', 'USAGE', key, 'SAMPLES', 0) <= 16384 then
    found[i] = redis.call('HGETALL', key)
  end
end
return found
