-- Puts a request that a worker popped but has not begun back to its place in the queue.
--
-- KEYS[1] owner      worker:owner:{user}
-- KEYS[2] requests   trading:user:{user}:requests
-- KEYS[3] processing trading:user:{user}:processing
-- KEYS[4] journal    trading:journal:{user}:<order>
-- KEYS[5] pop        worker:pop:{user}
-- ARGV[1] epoch of the caller
-- ARGV[2] worker id of the caller
-- ARGV[3] session id and
-- ARGV[4] number of the pop that took it
-- ARGV[5] the item, as popped
--
-- Only for the owner, because a successor answers what it finds in the processing list. Never for an order in the
-- journal, which may have been submitted. Safe to repeat: an item is put back once for each time it was popped,
-- and a call that comes late, after the session's next pop, does nothing.
-- Returns 'queued' (now, or by an earlier call), 'gone' (another owner's, or Valkey has lost it), or 'left': it
-- cannot be put back and stays in the processing list, so the caller has to answer it.
local owner = redis.call('HMGET', KEYS[1], 'epoch', 'worker')
if owner[1] ~= ARGV[1] or owner[2] ~= ARGV[2] then return 'gone' end
local taken = redis.call('LPOS', KEYS[3], ARGV[5])
local last = redis.call('HMGET', KEYS[5], 'session', 'number')
if last[1] ~= ARGV[3] or last[2] ~= ARGV[4] or redis.call('EXISTS', KEYS[4]) == 1 then
  return taken and 'left' or 'gone'
end
if taken then
  redis.call('LREM', KEYS[3], 1, ARGV[5])
  redis.call('RPUSH', KEYS[2], ARGV[5])
  return 'queued'
end
return redis.call('LPOS', KEYS[2], ARGV[5], 'RANK', -1) and 'queued' or 'gone'
