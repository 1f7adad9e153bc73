-- Writes a user's switch: who may trade. A missing switch means halted.
--
-- KEYS[1] switch     trading:switch:{user}
-- ARGV[1] version: grows with each change in PostgreSQL
-- ARGV[2] MAC of a switch that is overwritten whatever its version: one newer than PostgreSQL's is forged;
--         '-' for none
-- then, in pairs: '*' and the state of all accounts (open, reducing or halted), '*server' and '*mac', then
-- accounts and theirs; accounts that are not named have none of their own.
--
-- Idempotent. Returns 'ok', or 'older' without a change if the switch has a newer version already.
if redis.call('TYPE', KEYS[1]).ok == 'hash' then
  local stored = redis.call('HMGET', KEYS[1], '*version', '*mac')
  local current = tonumber(stored[1] or '')
  if current and current > tonumber(ARGV[1]) and (stored[2] or '') ~= ARGV[2] then return 'older' end
end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], '*version', ARGV[1])
for at = 3, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1])
end
return 'ok'
