-- Ends runs of jobs that the caller still holds.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV[1] runner
-- ARGV[2] seconds that a failed job is kept
-- ARGV[3] ms of waiting that one step of priority is worth, unless the settings say otherwise
-- ARGV[4…] the ends, seven values each: see `finish_all` in `finish_lib.lua`
--
-- Safe to repeat. Returns what became of each.
open(KEYS[1])
local outcomes = finish_all(ARGV[1], ARGV[2], ARGV[3], 4)
write_counts()
return outcomes
