-- Gives back a ring that came to a runner without room: the next idle runner gets it.
--
-- KEYS[1] settings   jobs:{tag}:meta
--
-- Returns the number of queues with work.
open(KEYS[1])
local queues = redis.call('ZRANGE', P .. 'ready', 0, -1)
for _, queue in ipairs(queues) do ring(queue) end
return #queues
