-- Returns the fate of an order that is overdue or cancelled, and makes sure that an order which no worker has
-- taken is never executed later. A cancel calls it before the deadline.
--
-- KEYS[1] seen       trading:user:{user}:seen:<request>
-- KEYS[2] requests   trading:user:{user}:requests
-- KEYS[3] processing trading:user:{user}:processing
-- KEYS[4] journal    trading:journal:{user}:<order>
-- KEYS[5] response   trading:response:{user}:<request>
-- ARGV[1] request id
-- ARGV[2] the answer for a request that is taken back
-- ARGV[3] seconds the answer stays readable
-- ARGV[4] ms that the id of a never queued request is remembered, so that it cannot be queued any more
--
-- Safe to repeat. Returns {fate, answer or ''}; fate is 'answered', 'journaled' (it may have reached the
-- broker), 'processing' (a worker took it), 'withdrawn' (it was still queued) or 'absent'. For 'absent' the
-- caller writes the answer after it has checked that the server has lost no data: an empty server knows nothing.
local answer = redis.call('GETRANGE', KEYS[5], 0, 524287)  -- a worker may write it
if answer ~= '' then return {'answered', answer} end
if redis.call('EXISTS', KEYS[4]) == 1 then return {'journaled', ''} end
local item = redis.call('GET', KEYS[1])
if not item then
  redis.call('SET', KEYS[1], '0|' .. ARGV[1] .. '||', 'PX', ARGV[4])
  return {'absent', ''}
end
if redis.call('LREM', KEYS[2], -1, item) > 0 then
  redis.call('SET', KEYS[5], ARGV[2], 'EX', ARGV[3])
  return {'withdrawn', ''}
end
if redis.call('LPOS', KEYS[3], item) then return {'processing', ''} end
return {'absent', ''}
