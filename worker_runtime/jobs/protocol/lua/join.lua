-- Registers a runner. Its beat is its lease: a runner that sees no change for a lease calls reap.lua.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV[1] runner id: new after every start
-- ARGV[2] its name: stays the same
-- ARGV[3] its node
-- ARGV[4] queues it serves, comma separated
-- ARGV[5] process id
-- ARGV[6] version
-- ARGV[7] seconds the entry lives without a renewal
--
-- Safe to repeat.
open(KEYS[1])
local now = clock()
redis.call('HSETNX', P .. 'beats', ARGV[1], 1)
local runner = P .. 'runner:' .. ARGV[1]
redis.call('HSETNX', runner, 'number', 0)
redis.call('HSETNX', runner, 'born_at', now)
redis.call('HSET', runner, 'name', ARGV[2], 'node', ARGV[3], 'queues', ARGV[4], 'pid', ARGV[5],
  'version', ARGV[6], 'state', 'started', 'seen_at', now)
redis.call('EXPIRE', runner, ARGV[7])
