-- Takes a request back that no worker has popped.
--
-- KEYS[1] requests   trading:user:{user}:requests
-- ARGV[1] the item, as `enqueue.lua` returned it
--
-- Returns 1 if it was still queued (it will never be executed), 0 if not.
return redis.call('LREM', KEYS[1], -1, ARGV[1])
