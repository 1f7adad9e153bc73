-- Adds the counts of a user's runner to the totals of all users together: one series for each user would be too
-- many. It is not part of `renew` because these totals are under the fleet's tag, which is another slot.
--
-- KEYS[1] settings of the fleet   jobs:{jobs}:meta
-- ARGV[1] runner
-- ARGV[2] number of this batch of counts, growing: a repeat is not added again
-- ARGV[3] the counts, as JSON of numbers by field
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
