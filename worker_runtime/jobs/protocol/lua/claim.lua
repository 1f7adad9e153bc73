-- Claims a runner's next jobs. Each gets a lease (the runner's), a fencing number and an attempt.
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
--
-- Returns {'jobs' or 'empty' or 'suspended' or 'stale' or 'lost', ms until a delayed job is due or -1,
-- {id, job, fence, attempt, crashes, ms since it was due, 1 if it is plain}, …}.
-- 'stale': the number is too old. 'lost': the runner is not registered.
open(KEYS[1])
local reply = claim(ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5] == '1', ARGV[6],
  tonumber(ARGV[7]), ARGV[8])
write_counts()
return reply
