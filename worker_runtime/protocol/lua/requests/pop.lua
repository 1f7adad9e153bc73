-- Pops a worker's next item: control messages first, then requests in order.
--
-- KEYS[1] owner      worker:owner:{user}
-- KEYS[2] control    worker:control:{user}:messages
-- KEYS[3] requests   trading:user:{user}:requests
-- KEYS[4] processing trading:user:{user}:processing
-- KEYS[5] pop        worker:pop:{user}
-- KEYS[6] switch     trading:switch:{user}
-- ARGV[1] epoch of the caller
-- ARGV[2] worker id of the caller
-- ARGV[3] session id, <worker>:<number>: a new one after each restart of the session process
-- ARGV[4] pop number, growing by one with each new pop; it keeps growing across session restarts
-- ARGV[5] 'control': leave the requests where they are; '' or missing: take what is next
--
-- A repeat with the same session and number returns the same item: a lost reply loses no order. (A repeat
-- of an empty pop checks again.) A pop older than the worker's last one takes nothing: it was sent before a
-- connection broke or a session process died, and came late, so nobody reads its reply.
-- Returns {kind, item, remaining ms, generation}; kind is 'control', 'request' (then moved to the
-- processing list), 'empty', 'stale' (an older pop), 'fenced' (another epoch owns the user) or 'no_owner'. For
-- a request the remaining time is negative when its deadline has passed, and the switch follows
-- as {field, value, …}: empty when it is missing, which means halted.
local function remaining(item)
  local deadline = tonumber(string.match(item, '^(%d+)|'))
  if not deadline then return -1 end
  local time = redis.call('TIME')
  return deadline - (time[1] * 1000 + math.floor(time[2] / 1000))
end

local owner = redis.call('HMGET', KEYS[1], 'epoch', 'worker', 'generation')
if not owner[1] then return {'no_owner', '', 0, ''} end
if owner[1] ~= ARGV[1] or owner[2] ~= ARGV[2] then return {'fenced', '', 0, ''} end
local generation = owner[3] or ''

local last = redis.call('HMGET', KEYS[5], 'session', 'number', 'kind', 'item')
local repeated = last[1] == ARGV[3] and last[2] == ARGV[4]
local same = last[1] == ARGV[3] or (last[1] and string.sub(last[1], 1, #ARGV[2] + 1) == ARGV[2] .. ':')
if same and tonumber(last[2]) > tonumber(ARGV[4]) then return {'stale', '', 0, generation} end
if repeated and last[3] ~= 'empty' then
  if last[3] ~= 'request' then return {last[3], last[4], 0, generation} end
  return {last[3], last[4], remaining(last[4]), generation, redis.call('HGETALL', KEYS[6])}
end

local kind, item, remaining_ms = 'control', redis.call('RPOP', KEYS[2]), 0
if not item then
  kind = 'request'
  item = ARGV[5] ~= 'control' and redis.call('LMOVE', KEYS[3], KEYS[4], 'RIGHT', 'LEFT')
  if item then
    remaining_ms = remaining(item)
  elseif repeated then  -- its number is remembered already
    return {'empty', '', 0, generation}
  else
    kind, item = 'empty', ''
  end
end
redis.call('HSET', KEYS[5], 'session', ARGV[3], 'number', ARGV[4], 'kind', kind, 'item', item)
redis.call('EXPIRE', KEYS[5], 3600)
if kind == 'request' then return {kind, item, remaining_ms, generation, redis.call('HGETALL', KEYS[6])} end
return {kind, item, remaining_ms, generation}
