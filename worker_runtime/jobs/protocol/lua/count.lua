-- Adds what a runner of one user's own jobs has counted to the totals of all users together: a series for each
-- user would be too many. The totals are the fleet's keys, so this is a script of its own beside `renew`.
--
-- KEYS[1] settings of the fleet   jobs:{jobs}:meta
-- ARGV[1] runner
-- ARGV[2] number of what it has counted, growing: a repeat is not added again
-- ARGV[3] what it has counted, as JSON of numbers by field
--
-- Returns 1, or 0 for a repeat.
open(KEYS[1])
local last = P .. 'counted:' .. ARGV[1]
if redis.call('GET', last) == ARGV[2] then return 0 end
for field, number in pairs(cjson.decode(ARGV[3])) do
  redis.call('HINCRBY', P .. 'users', field, string.format('%.0f', number))
end
redis.call('SET', last, ARGV[2], 'EX', 3600)
return 1
