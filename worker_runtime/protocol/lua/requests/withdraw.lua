-- Takes a request back that no worker has popped, and leaves the answer that it will never be executed.
--
-- KEYS[1] requests   trading:user:{user}:requests
-- KEYS[2] response   trading:response:{user}:<request>
-- ARGV[1] the item, as `enqueue.lua` returned it
-- ARGV[2] the answer
-- ARGV[3] seconds the answer stays readable
--
-- Safe to repeat: if the reply is lost, the answer is found where a worker's would be.
-- Returns 1 if it was still queued (it will never be executed), 0 if not.
if redis.call('LREM', KEYS[1], -1, ARGV[1]) == 0 then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
return 1
