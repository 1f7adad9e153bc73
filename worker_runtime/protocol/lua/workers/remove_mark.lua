-- Removes a user's mark and metadata, if the mark is still the caller's own, or the one that it has seen.
--
-- KEYS[1] mark       worker:active:{user}
-- KEYS[2] metadata   worker:metadata:{user}
-- ARGV[1] what the mark says, `epoch:worker` (its first 256 bytes); '': it was missing
--
-- Returns 1 if something was removed, 0 if not.
if redis.call('GETRANGE', KEYS[1], 0, 255) ~= ARGV[1] then return 0 end
return math.min(redis.call('DEL', KEYS[1], KEYS[2]), 1)
