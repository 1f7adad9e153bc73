-- Writes a user's switch: who may trade. A missing switch means halted.
--
-- KEYS[1] switch     trading:switch:{user}
-- ARGV[1] version: grows with each change in PostgreSQL
-- then, in pairs: '*' and the state of all accounts (open, reducing or halted), then accounts and theirs;
-- accounts that are not named have none of their own.
--
-- Idempotent. Returns 'ok', or 'older' without a change if the switch has a newer version already.
local current = tonumber(redis.call('HGET', KEYS[1], '*version') or '')
if current and current > tonumber(ARGV[1]) then return 'older' end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], '*version', ARGV[1], unpack(ARGV, 2))
return 'ok'
