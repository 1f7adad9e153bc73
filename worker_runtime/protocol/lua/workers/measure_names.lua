-- Measures what workers hold, one step of a walk over all names.
--
-- ARGV[1] cursor of SCAN; '0' begins
-- ARGV[2] names of one step, about
-- ARGV[3] entries of one key beyond which its bytes are not counted any more
--
-- A name counts as one, and so does each entry of a list, hash, set or sorted set, but for the entries of a list of events,
-- which is as long as an outage of the orchestrators was. Bytes are exact: a sample could be made to look small.
-- Returns {cursor, writer, names, bytes, writer, names, bytes…}.
local LENGTH = {list = 'LLEN', hash = 'HLEN', set = 'SCARD', zset = 'ZCARD', stream = 'XLEN'}
local KEY_BYTES = 96  -- about what a name costs besides its own bytes and its value's
local max_entries = tonumber(ARGV[3])

-- Entries and bytes of a key; nil if it is gone.
local function measure(key)
  local length = redis.pcall('STRLEN', key)
  if type(length) == 'number' then return 0, length + #key + KEY_BYTES end
  local command = LENGTH[redis.call('TYPE', key).ok]
  if not command then return nil end
  local entries = redis.call(command, key)
  if entries > max_entries then return entries, entries * KEY_BYTES end
  return entries, redis.call('MEMORY', 'USAGE', key, 'SAMPLES', 0)
end

local step = redis.call('SCAN', ARGV[1], 'COUNT', ARGV[2])
local writers, names, bytes = {}, {}, {}
for _, key in ipairs(step[2]) do
  local writer = writer_of(key)
  if writer then
    local entries, size = measure(key)
    if entries then
      if not names[writer] then
        writers[#writers + 1] = writer
        names[writer], bytes[writer] = 0, 0
      end
      if string.sub(key, 1, 1) == '{' then entries = 0 end
      names[writer] = names[writer] + 1 + entries
      bytes[writer] = bytes[writer] + size
    end
  end
end
local reply = {step[1]}
for _, writer in ipairs(writers) do
  reply[#reply + 1] = writer
  reply[#reply + 1] = names[writer]
  reply[#reply + 1] = bytes[writer]
end
return reply
