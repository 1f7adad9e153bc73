-- Takes a claim back from an entry that may not be claimed: the worker has or had a user, was not launched
-- by us, or its key is not proven.
--
-- KEYS[1] claim      pool:{pool}:claim:<claim>
-- KEYS[2] worker     pool:{pool}:worker:<worker>
-- ARGV[1] claim id
-- ARGV[2] worker id
--
-- Deletes only what still names the other: a repeat of the claim may have got another worker. A free worker
-- whose entry somebody else wrote comes back with its next announcement.
if redis.call('GET', KEYS[1]) == ARGV[2] then redis.call('DEL', KEYS[1]) end
if redis.call('HGET', KEYS[2], 'claim') == ARGV[1] then redis.call('DEL', KEYS[2]) end
