-- Reads what workers write, however large they made it.
--
-- KEYS     keys of one kind
-- ARGV[1]  the kind, 'string' or 'hash'
-- ARGV[2]  bytes of a hash; 16 KiB if missing
--
-- Returns for each key the first 256 bytes of a string, false for any other; or fields and values of a hash in turn,
-- false for no key, and none for another kind, more bytes, or more than a field for each 256.
local max_bytes = tonumber(ARGV[2] or 16384)
local values = {}
for i, key in ipairs(KEYS) do
  local kind = redis.call('TYPE', key).ok
  values[i] = ARGV[1] == 'hash' and kind ~= 'none' and {}
  if kind ~= ARGV[1] then
  elseif ARGV[1] == 'string' then
    values[i] = redis.call('GETRANGE', key, 0, 255)
  elseif redis.call('HLEN', key) <= max_bytes / 256 and redis.call('MEMORY', 'USAGE', key, 'SAMPLES', 0) <= max_bytes then
    values[i] = redis.call('HGETALL', key)
  end
end
return values
