-- Counts waiting jobs, and finds how long the oldest has waited, by queue and priority. Changes nothing.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV[1] jobs that are read in each subqueue; those behind them are only counted
--
-- Parked jobs wait for their receiver: they are counted, and their age is not that of the queue.
-- Returns {delayed jobs, failed jobs, runners, {queue, priority or '' for jobs only counted, jobs, ms since the oldest
-- was due}, …}.
open(KEYS[1])
local now = clock()
local max_jobs = tonumber(ARGV[1])
local reply = {redis.call('ZCARD', P .. 'delayed'), redis.call('ZCARD', P .. 'failed'),
  redis.call('HLEN', P .. 'beats')}
for _, queue in ipairs(redis.call('ZRANGE', P .. 'ready', 0, -1)) do
  local seen, order = {}, {}
  local function count(priority, jobs, waited)
    local entry = seen[priority]
    if not entry then
      entry = {queue, priority, 0, 0}
      seen[priority] = entry
      order[#order + 1] = entry
    end
    entry[3] = entry[3] + jobs
    entry[4] = math.max(entry[4], waited)
  end
  for _, name in ipairs(redis.call('ZRANGE', P .. 'subqueues:' .. queue, 0, -1)) do
    local subqueue = P .. 'subqueue:' .. queue .. ':' .. name
    local ids = redis.call('ZRANGE', subqueue, 0, max_jobs - 1)
    for _, id in ipairs(ids) do
      local job = redis.call('HMGET', P .. 'job:' .. id, 'priority', 'due')
      if job[1] then count(job[1], 1, now - tonumber(job[2])) end
    end
    local behind = redis.call('ZCARD', subqueue) - #ids
    if behind > 0 then count('', behind, 0) end
  end
  for _, entry in ipairs(order) do reply[#reply + 1] = entry end
end
for _, place in ipairs(redis.call('ZRANGE', P .. 'parked', 0, -1)) do
  local parked = redis.call('ZCARD', P .. 'parked:' .. place)
  if parked > 0 then reply[#reply + 1] = {string.match(place, '^%S+'), 'parked', parked, 0} end
end
return reply
