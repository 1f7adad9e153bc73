-- Takes a runner's next jobs. Each gets a lease (the runner's), a fencing number and an attempt.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV[1] runner
-- ARGV[2] number of this claim, growing: an older one than the last comes late, and takes nothing
-- ARGV[3] node of the runner
-- ARGV[4] how many jobs at the most
-- ARGV[5] 1 if there are other runners, which may have to be woken
-- ARGV[6] queues that the runner serves, comma separated; '*' means all
-- ARGV[7] how many plain jobs beyond that (see `claiming.lua`)
-- ARGV[8] types that are brief, comma separated
-- ARGV[9] 1 if it was sent behind a call that blocks: later claims may come before it, only `held` makes it stale;
--         and what is due it leaves to them
--
-- Returns {'jobs' or 'empty' or 'suspended' or 'stale' or 'lost', ms until a delayed job is due or -1,
-- {id, job, fence, attempt, crashes, ms that it waited since it was due, 1 if its type has a limit}, …}.
-- 'lost': the runner is no longer registered.
open(KEYS[1])
local reply = claim(ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5] == '1', ARGV[6],
  tonumber(ARGV[7]), ARGV[8], ARGV[9] == '1')
write_counts()
return reply
