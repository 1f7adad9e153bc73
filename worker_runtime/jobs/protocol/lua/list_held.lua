-- Lists what a runner holds, after its connection broke: finds the claims whose reply was lost.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV[1] runner
-- ARGV[2] number, larger than that of the last claim: claims that are still under way take nothing
--
-- Returns {'ok', {id, job, fence, attempt, crashes, 0, 0, 1 if someone has cancelled it}, …} or {'lost'}.
open(KEYS[1])
local runner = P .. 'runner:' .. ARGV[1]
if redis.call('EXISTS', runner) == 0 then return {'lost'} end
redis.call('HSET', runner, 'number', ARGV[2])
local reply = {'ok'}
for _, id in ipairs(redis.call('SMEMBERS', P .. 'held:' .. ARGV[1])) do
  local job = redis.call('HMGET', P .. 'job:' .. id, 'body', 'fence', 'attempt', 'crashes', 'cancelled')
  if job[1] then
    local fence, attempt, crashes = tonumber(job[2]), tonumber(job[3]), tonumber(job[4])
    reply[#reply + 1] = {id, job[1], fence, attempt, crashes, 0, 0, tonumber(job[5] or 0)}
  end
end
return reply
