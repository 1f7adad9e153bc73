-- Stores and announces the answer to one request, and ends its processing.
--
-- KEYS[1] response   trading:response:{user}:<request>
-- KEYS[2] processing trading:user:{user}:processing
-- KEYS[3] requests   trading:user:{user}:requests
-- KEYS[4] control    worker:control:{user}:messages
-- ARGV[1] the item, as popped
-- ARGV[2] the answer
-- ARGV[3] seconds the answer stays readable
-- ARGV[4] channel of the API process that waits, or ''
--
-- Safe to repeat. Returns {1 if the item was still in processing, else 0; 1 if there is more to pop, else 0: then a
-- later item rings the doorbell}.
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
local removed = redis.call('LREM', KEYS[2], 1, ARGV[1])
if ARGV[4] ~= '' then
  redis.call('PUBLISH', ARGV[4], ARGV[2])
end
return {removed, redis.call('EXISTS', KEYS[3], KEYS[4]) > 0 and 1 or 0}
