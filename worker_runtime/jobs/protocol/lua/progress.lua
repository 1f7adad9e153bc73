-- Stores the progress of a running job, if the caller still holds it.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV[1] runner
-- ARGV[2] job id
-- ARGV[3] fencing number of the claim
-- ARGV[4] progress, as JSON
--
-- Returns 1, or 0 if the caller no longer holds it.
open(KEYS[1])
local key = P .. 'job:' .. ARGV[2]
local job = redis.call('HMGET', key, 'fence', 'state', 'runner')
if job[1] ~= ARGV[3] or job[2] ~= 'running' or job[3] ~= ARGV[1] then return 0 end
redis.call('HSET', key, 'progress', ARGV[4])
return 1
