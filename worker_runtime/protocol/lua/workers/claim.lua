-- Claims the pool worker that has been ready longest. Exactly one caller gets a worker; the same claim
-- id always gets the same one.
--
-- KEYS[1] ready      pool:{pool}:ready
-- KEYS[2] claim      pool:{pool}:claim:<claim>
-- KEYS[3] wait queue pool:{pool}:line     zset: user → since when they wait (ms)    (may be left out; the
--                    key was not renamed with the functions, because a stored key keeps its name)
-- KEYS[4] asked      pool:{pool}:asked    zset: user → when they asked last (ms)    (with KEYS[3])
-- ARGV[1] claim id
-- ARGV[2] prefix of the workers' keys, pool:{pool}:worker:   (same slot)
-- ARGV[3] seconds that the claim is kept
-- ARGV[4] user                                                                    (with KEYS[3])
-- ARGV[5] ms after which a user who does not ask again leaves the queue           (with KEYS[3])
-- ARGV[6] version whose workers stay in the pool, or ''                           (with KEYS[3])
-- ARGV[7] thousandths of the server's memory beyond which nobody gets a worker, or '' (with KEYS[3])
-- ARGV[8…] workers that this claim was refused; they leave the ready list         (with KEYS[3])
--
-- While users wait, a worker goes to a user only if more workers are ready than users are ahead in the wait queue.
-- One call looks at `MAX_ENTRIES` entries of the ready list at most. More entries of dead workers can only be forged;
-- the call has removed those that it looked at, so the next call continues behind them.
-- Returns {'claimed' or 'again', worker id, public key, proof}, {'empty'}, {'full'} (memory is short), or
-- {'gone', worker id} if this claim's worker is no longer alive, or no longer this claim's: a worker that
-- slept past its entry's end comes back as a free one, and another claim may have it.
local MAX_ENTRIES = 1000
local function reply(status, worker)
  local entry = redis.call('HMGET', ARGV[2] .. worker, 'public_key', 'proof', 'claim')
  if not entry[1] or entry[3] ~= ARGV[1] then return {'gone', worker} end
  return {status, worker, string.sub(entry[1], 1, 256), string.sub(entry[2] or '', 1, 256)}  -- the worker wrote them
end

local before = redis.call('GET', KEYS[2])
if before then return reply('again', before) end
if is_memory_used(ARGV[7]) then return {'full'} end
local waiting = KEYS[3] and redis.call('EXISTS', KEYS[3]) == 1
if waiting then
  local time = redis.call('TIME')
  local expired_before = time[1] * 1000 + math.floor(time[2] / 1000) - ARGV[5]
  for _, user in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', expired_before)) do
    redis.call('ZREM', KEYS[3], user)
    redis.call('ZREM', KEYS[4], user)
  end
  local position = redis.call('ZRANK', KEYS[3], ARGV[4]) or redis.call('ZCARD', KEYS[3])
  if position >= redis.call('ZCARD', KEYS[1]) then return {'empty'} end
end
local avoided, passed = ARGV[6] or '', {}
if ARGV[8] then redis.call('ZREM', KEYS[1], unpack(ARGV, 8)) end
local function put_back()
  for _, entry in ipairs(passed) do redis.call('ZADD', KEYS[1], entry[2], entry[1]) end
end
for _ = 1, MAX_ENTRIES do
  local popped = redis.call('ZPOPMIN', KEYS[1])
  local worker = popped[1]
  if not worker then
    put_back()
    return {'empty'}
  end
  -- An expired entry is a dead worker: skip it. One in another state was claimed before.
  local free = redis.call('HGET', ARGV[2] .. worker, 'state') == 'ready'
  if free and avoided ~= '' and redis.call('HGET', ARGV[2] .. worker, 'version') == avoided then
    passed[#passed + 1] = popped
  elseif free then
    put_back()
    redis.call('HSET', ARGV[2] .. worker, 'state', 'claimed', 'claim', ARGV[1])
    redis.call('SET', KEYS[2], worker, 'EX', ARGV[3])
    if waiting then
      redis.call('ZREM', KEYS[3], ARGV[4])
      redis.call('ZREM', KEYS[4], ARGV[4])
    end
    return reply('claimed', worker)
  end
end
put_back()
return {'empty'}
