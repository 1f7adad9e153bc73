-- Rings a user's doorbell again while something waits: a ring may have gone to a worker that is frozen or
-- has been replaced, and would be lost.
--
-- KEYS[1] requests   trading:user:{user}:requests
-- KEYS[2] doorbell   trading:user:{user}:doorbell
-- KEYS[3] mark       worker:active:{user}
-- KEYS[4] control    worker:control:{user}:messages
--
-- Safe to repeat: a ring with nothing to pop only costs an empty pop. Returns 1 if the mark is there, else 0.
if redis.call('EXISTS', KEYS[1], KEYS[4]) > 0 and redis.call('LLEN', KEYS[2]) == 0 then
  redis.call('LPUSH', KEYS[2], '1')
end
return redis.call('EXISTS', KEYS[3])
