-- Announces the job types of a registered runner. From then on its claims take jobs of these types
-- only.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV[1] runner
-- ARGV[2] manifests that are kept, beyond those of live runners
-- ARGV[3] number of manifests, then for each:
--   its digest
--   the package of its first type
--   the manifest with its MAC
--   number of its types
--   for each type its name, the type as the queue knows it, with its version, and the package that declares it
--
-- Safe to repeat. Returns {'published'}; {'lost'} if the runner is not registered; or {'conflict',
-- type, package, other package} if a live runner, or this one, has the type from another package:
-- then nothing has changed.
open(KEYS[1])
local runner = P .. 'runner:' .. ARGV[1]
if redis.call('HEXISTS', P .. 'beats', ARGV[1]) == 0 or redis.call('EXISTS', runner) == 0 then return {'lost'} end

local live = {} -- digest → true, of the other live runners
for _, other in ipairs(redis.call('HKEYS', P .. 'beats')) do
  if other ~= ARGV[1] then
    for digest in string.gmatch(redis.call('HGET', P .. 'runner:' .. other, 'manifests') or '', '[^,]+') do
      live[digest] = true
    end
  end
end

-- Returns the package that declares a type in another manifest. `package` declares it here, in a manifest whose first
-- type is of `first`.
local function owner_in(other, name, package, first)
  local owner = redis.call('HGET', P .. 'packages:' .. other, name)
  if owner then return owner end
  -- A runner of an earlier release says of which package its first type is, and of the others nothing.
  owner = redis.call('HGET', P .. 'packages', other)
  return owner and owner ~= first and owner or package
end

local announced, owners, digests, at = {}, {}, {}, 4
for _ = 1, tonumber(ARGV[3]) do
  local digest, first, body, types = ARGV[at], ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3])
  local names, packages = {}, {}
  for number = 1, types do
    local name, queued, package = unpack(ARGV, at + 1 + 3 * number, at + 3 + 3 * number)
    local owner = owners[name] or package
    for other in pairs(live) do
      if owner == package and redis.call('SISMEMBER', P .. 'types:' .. other, name) == 1 then
        owner = owner_in(other, name, package, first)
      end
    end
    if owner ~= package then return {'conflict', name, package, owner} end
    owners[name] = package
    names[2 * number - 1], names[2 * number] = name, queued
    packages[2 * number - 1], packages[2 * number] = name, package
  end
  announced[#announced + 1] = {digest = digest, first = first, body = body, names = names, packages = packages}
  digests[#digests + 1] = digest
  at = at + 4 + 3 * types
end

local _, us = clock()
for _, manifest in ipairs(announced) do
  redis.call('HSET', P .. 'manifests', manifest.digest, manifest.body)
  redis.call('HSET', P .. 'packages', manifest.digest, manifest.first)
  redis.call('ZADD', P .. 'announced', us, manifest.digest)
  for _, name in ipairs(manifest.names) do redis.call('SADD', P .. 'types:' .. manifest.digest, name) end
  for number = 1, #manifest.packages, 2 do
    redis.call('HSET', P .. 'packages:' .. manifest.digest, manifest.packages[number], manifest.packages[number + 1])
  end
  live[manifest.digest] = true
end
redis.call('HSET', runner, 'manifests', table.concat(digests, ','))
for _, old in ipairs(redis.call('ZRANGE', P .. 'announced', 0, -tonumber(ARGV[2]) - 1)) do
  if not live[old] then
    redis.call('ZREM', P .. 'announced', old)
    redis.call('HDEL', P .. 'manifests', old)
    redis.call('HDEL', P .. 'packages', old)
    redis.call('DEL', P .. 'types:' .. old, P .. 'packages:' .. old)
  end
end
return {'published'}
