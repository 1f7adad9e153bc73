-- Renews a pool worker's entry. The worker calls it every few seconds.
--
-- KEYS[1] worker     pool:{pool}:worker:<worker>
-- ARGV[1] time to live, ms
-- ARGV[2…] field, value… : public_key, proof, task, version, reserved
--
-- Returns the worker's state: 'ready', 'claimed', 'confirmed' or 'released'; '' as long as the pool does not
-- have it (see `admit_worker.lua`).
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return redis.call('HGET', KEYS[1], 'state') or ''
