-- Removes what a worker wrote, one step of a walk over all names. Its rights are gone before the walk begins.
--
-- ARGV[1] cursor of SCAN; '0' begins
-- ARGV[2] names of one step, about
-- ARGV[3] writers whose names go, as `writer_of` names them, each on a line of its own
-- ARGV[4…] names that stay: queues, and what tells the fate of orders that are not settled
--
-- A user who has another worker by now keeps all: nobody can tell whose it is.
-- Returns {cursor, names that were removed}.
local writers, replaced, kept = {}, {}, {}
for writer in string.gmatch(ARGV[3], '[^\n]+') do writers[writer] = true end
for writer in pairs(writers) do
  local user = string.match(writer, '^user (.+)$')
  local owner = user and redis.call('HGET', 'worker:owner:{' .. user .. '}', 'worker')
  if owner and owner ~= '-' and not writers['worker ' .. owner] then replaced[writer] = true end
end
for at = 4, #ARGV do kept[ARGV[at]] = true end
local step = redis.call('SCAN', ARGV[1], 'COUNT', ARGV[2])
local removed = 0
for _, key in ipairs(step[2]) do
  local writer = writer_of(key)
  if writer and writers[writer] and not replaced[writer] and not kept[key] then
    removed = removed + redis.call('UNLINK', key)
  end
end
return {step[1], removed}
