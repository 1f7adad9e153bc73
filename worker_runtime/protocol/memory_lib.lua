-- What the scripts that take new work share. It is loaded before each of them and does nothing by itself.

-- Whether more than this many thousandths of the server's memory are in use. Never without a limit, and for ''.
local function is_memory_used(permille)
  if (permille or '') == '' then return false end
  local info = redis.call('INFO', 'memory')
  local used, limit = string.match(info, 'used_memory:(%d+)'), string.match(info, 'maxmemory:(%d+)')
  return tonumber(limit) > 0 and used * 1000 > limit * permille
end
