-- Names whose login can have run a command on a key, besides those of services.
--
-- ARGV: the keys
--
-- Returns for each 'worker <id>', 'budget <name>' for the workers whose calls that budget counts, 'fleet <tag>', or '' for a
-- key that only services use. A user's keys, also those that their worker may only read, give the worker that is their owner.
local READ_BY_USER = {['worker:owner'] = true, ['trading:switch'] = true}

local logins = {}
for number, key in ipairs(ARGV) do
  local kind, tag = string.match(key, '^([%a:]+):{([^}]*)}')
  local login = READ_BY_USER[kind] and 'user ' .. tag or writer_of(key) or ''
  local user = string.match(login, '^user (.+)$')
  if user then
    local owner = redis.call('HGET', 'worker:owner:{' .. user .. '}', 'worker')
    login = owner and owner ~= '-' and 'worker ' .. owner or ''
  end
  logins[number] = login
end
return logins
