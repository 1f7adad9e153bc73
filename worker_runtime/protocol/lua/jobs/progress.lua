-- Notes how far a running job is, if the caller still has it.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV[1] job id
-- ARGV[2] fencing number of the claim
-- ARGV[3] progress, as JSON
--
-- Returns 1, or 0 if this run is no longer the caller's.
open(KEYS[1])
local key = P .. 'job:' .. ARGV[1]
local job = redis.call('HMGET', key, 'fence', 'state')
if job[1] ~= ARGV[2] or job[2] ~= 'running' then return 0 end
redis.call('HSET', key, 'progress', ARGV[3])
return 1
