-- Sends a control message to a user's worker and rings its doorbell.
--
-- KEYS[1] control    worker:control:{user}:messages
-- KEYS[2] doorbell   trading:user:{user}:doorbell
-- ARGV[1] the signed message
redis.call('LPUSH', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[1], 3600)
if redis.call('LLEN', KEYS[2]) == 0 then
  redis.call('LPUSH', KEYS[2], '1')
end
return 1
