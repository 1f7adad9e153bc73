-- Claims the pool worker that has been ready longest. Exactly one caller gets a worker; the same claim
-- id always gets the same one.
--
-- KEYS[1] ready      pool:{pool}:ready
-- KEYS[2] claim      pool:{pool}:claim:<claim>
-- ARGV[1] claim id
-- ARGV[2] prefix of the workers' keys, pool:{pool}:worker:   (same slot)
-- ARGV[3] seconds that the claim is kept
--
-- Returns {'claimed' or 'again', worker id, public key, proof, task, version}, {'empty'}, or
-- {'gone', worker id} if this claim's worker is no longer alive, or no longer this claim's: a worker that
-- slept past its entry's end comes back as a free one, and another claim may have it by now.
local function found(status, worker)
  local w = redis.call('HMGET', ARGV[2] .. worker, 'public_key', 'proof', 'task', 'version', 'claim')
  if not w[1] or w[5] ~= ARGV[1] then return {'gone', worker} end
  return {status, worker, w[1], w[2], w[3] or '', w[4] or ''}
end

local before = redis.call('GET', KEYS[2])
if before then return found('again', before) end
while true do
  local popped = redis.call('ZPOPMIN', KEYS[1])
  local worker = popped[1]
  if not worker then return {'empty'} end
  -- An expired entry is a dead worker: skip it. One in another state was claimed before.
  if redis.call('HGET', ARGV[2] .. worker, 'state') == 'ready' then
    redis.call('HSET', ARGV[2] .. worker, 'state', 'claimed', 'claim', ARGV[1])
    redis.call('SET', KEYS[2], worker, 'EX', ARGV[3])
    return found('claimed', worker)
  end
end
