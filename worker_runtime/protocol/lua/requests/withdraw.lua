-- Takes a request back that no worker has popped, and leaves the answer that it will never be executed.
--
-- KEYS[1] requests   trading:user:{user}:requests
-- KEYS[2] response   trading:response:{user}:<request>
-- KEYS[3] journal    trading:journal:{user}:<order>   (of a request that is no order, too: it is never there)
-- ARGV[1] the item, as `enqueue.lua` returned it
-- ARGV[2] the answer
-- ARGV[3] seconds the answer stays readable
--
-- Safe to repeat: if the reply is lost, the answer is found where a worker's would be.
-- Returns 1 if it was still queued (it will never be executed), 0 if not. An order in the journal may have been
-- submitted, even if somebody has pushed its item once more.
if redis.call('EXISTS', KEYS[3]) == 1 then return 0 end
if redis.call('LREM', KEYS[1], -1, ARGV[1]) == 0 then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'EX', ARGV[3])
return 1
