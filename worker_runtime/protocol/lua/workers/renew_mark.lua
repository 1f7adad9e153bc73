-- Renews a worker's mark and metadata, unless its epoch is no longer the owner's.
--
-- KEYS[1] owner      worker:owner:{user}
-- KEYS[2] mark       worker:active:{user}
-- KEYS[3] metadata   worker:metadata:{user}
-- ARGV[1] epoch of the caller
-- ARGV[2] worker id of the caller
-- ARGV[3] time to live, ms
-- ARGV[4…] field, value, field, value… of the metadata
--
-- Returns 'ok', 'fenced' or 'no_owner'; only 'ok' extends the caller's lease.
local owner = redis.call('HMGET', KEYS[1], 'epoch', 'worker')
if not owner[1] then return 'no_owner' end
if owner[1] ~= ARGV[1] or owner[2] ~= ARGV[2] then return 'fenced' end
redis.call('SET', KEYS[2], ARGV[1] .. ':' .. ARGV[2], 'PX', ARGV[3])
if #ARGV > 3 then
  redis.call('DEL', KEYS[3])  -- fields of another version would be of no use, and are signed by nobody
  redis.call('HSET', KEYS[3], unpack(ARGV, 4))
  redis.call('PEXPIRE', KEYS[3], ARGV[3])
end
return 'ok'
