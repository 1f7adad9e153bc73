-- Writes the ends of a runner's jobs and claims its next ones, as `finish` and then `claim` would.
-- One script, because a script costs as much to open as two calls, and because the count of running jobs need
-- not be written when one job ends and another of its type begins.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV[1] runner
-- ARGV[2] number of this claim, growing: a claim that arrives late has an older number, and takes nothing
-- ARGV[3] node of the runner
-- ARGV[4] how many jobs to claim at most
-- ARGV[5] 1 if there are other runners, which may have to be woken
-- ARGV[6] queues that the runner serves, comma separated; '*' means all
-- ARGV[7] how many plain jobs to claim beyond that (see `claim_lib.lua`)
-- ARGV[8] types that are brief, comma separated
-- ARGV[9] seconds that a failed job is kept
-- ARGV[10] ms of waiting that one step of priority is worth, unless the settings say otherwise
-- ARGV[11…] the ends, seven values each: see `finish_all`
--
-- The ends may be repeated, also by a claim that arrives late. Returns what became of each end, then what
-- `claim` returns.
open(KEYS[1])
local reply = finish_all(ARGV[1], ARGV[9], ARGV[10], 11)
reply[#reply + 1] = claim(ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5] == '1', ARGV[6],
  tonumber(ARGV[7]), ARGV[8])
write_counts()
return reply
