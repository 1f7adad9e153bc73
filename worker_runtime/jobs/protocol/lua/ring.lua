-- Gives back a ring that came to a runner without room: the next idle runner gets it.
--
-- KEYS[1] settings   jobs:{tag}:meta
open(KEYS[1])
ring_all()
