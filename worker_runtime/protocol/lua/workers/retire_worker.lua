-- Takes a given free worker out of the pool, so that it can be stopped and no user gets it.
--
-- KEYS[1] ready      pool:{pool}:ready
-- KEYS[2] worker     pool:{pool}:worker:<worker>
-- ARGV[1] id of this retirement; the same id may ask again
-- ARGV[2] worker id
--
-- Returns the worker's task, or false if it is not free (claimed meanwhile, dead).
local entry = redis.call('HMGET', KEYS[2], 'state', 'claim', 'task')
if entry[1] == 'claimed' and entry[2] == ARGV[1] then return entry[3] or '' end
if entry[1] ~= 'ready' then return false end
redis.call('ZREM', KEYS[1], ARGV[2])
redis.call('HSET', KEYS[2], 'state', 'claimed', 'claim', ARGV[1])
return entry[3] or ''
