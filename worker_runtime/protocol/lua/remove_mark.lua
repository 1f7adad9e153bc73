-- Removes a worker's own mark and metadata; those of a later epoch stay.
--
-- KEYS[1] mark       worker:active:{user}
-- KEYS[2] metadata   worker:metadata:{user}
-- ARGV[1] epoch of the caller
-- ARGV[2] worker id of the caller
--
-- Returns 1 if the mark was the caller's, 0 if not.
if redis.call('GET', KEYS[1]) ~= ARGV[1] .. ':' .. ARGV[2] then return 0 end
redis.call('DEL', KEYS[1], KEYS[2])
return 1
