-- What the scripts that count and remove names share. It is loaded before each of them and does nothing by itself.

-- Kinds of keys under a user's tag that the user's worker may write (infra/valkey/worker_users.py).
local KINDS_OF_USER = {
  ['trading:user'] = true, ['trading:response'] = true, ['trading:journal'] = true, ['worker:active'] = true,
  ['worker:metadata'] = true, ['worker:pop'] = true, ['worker:control'] = true,
}
local KINDS_OF_WORKER = {worker = true, inbox = true, reply = true}

-- Returns who may have written a key: 'user <id>', 'worker <id>', 'budget <name>' for the workers whose calls that budget
-- counts, or 'fleet <tag>' for the job runners of a tag, whose keys services write, too; nil: only services write it.
local function writer_of(key)
  local kind, tag, rest = string.match(key, '^([%a:]+):{([^}]*)}:?(.*)$')
  if not kind then
    local worker = string.match(key, '^{worker:events}:of:(.+)$')
    return worker and 'worker ' .. worker
  end
  if KINDS_OF_USER[kind] then
    if string.sub(rest, 1, 7) == 'client:' then return nil end
    return 'user ' .. tag
  end
  if kind == 'jobs' then
    local user = string.match(tag, '^user:(.+)$')
    return user and 'user ' .. user or 'fleet ' .. tag
  end
  if kind == 'broker:budget' then return 'budget ' .. tag end
  if kind == 'pool' then
    local of, worker = string.match(rest, '^(%a+):([^:]+)')
    return KINDS_OF_WORKER[of] and 'worker ' .. worker
  end
  return nil
end
