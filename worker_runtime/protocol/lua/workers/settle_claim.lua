-- Settles a claim: confirms or releases it, and the first call decides.
--
-- KEYS[1] worker     pool:{pool}:worker:<worker>
-- ARGV[1] claim id
-- ARGV[2] 'confirmed' (the worker calls it, before it connects) or 'released' (the orchestrator)
--
-- Returns the state that holds from now on: 'confirmed' or 'released'; 'unknown' if the worker's entry
-- is gone or belongs to another claim (for the worker this means: do not connect).
local entry = redis.call('HMGET', KEYS[1], 'state', 'claim')
if not entry[1] or entry[2] ~= ARGV[1] then return 'unknown' end
if entry[1] == 'claimed' then
  redis.call('HSET', KEYS[1], 'state', ARGV[2])
  return ARGV[2]
end
return entry[1]
