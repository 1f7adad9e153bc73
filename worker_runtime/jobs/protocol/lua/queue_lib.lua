-- What the scripts of the job queue share. It is put before each of them, and does nothing by itself.
--
-- Every key carries one hash tag ('jobs' for the fleet, a user's id for a user's own jobs) and is made
-- from the key of the settings, KEYS[1] of each script: 'jobs:{tag}:meta' gives the prefix 'jobs:{tag}:'.
-- worker_runtime/jobs/protocol/keys.py says what each holds.
local P, META

-- What a user may leave behind on a server that holds the leases, too. The fleet's jobs are our own.
local USERS_FAILED, USERS_EVENTS, USERS_EVENTS_LIVE = 50, 100, 86400

local function open(meta)
  META = meta
  P = string.sub(meta, 1, -5)
end

-- Whether these are a user's own jobs.
local function of_user()
  return string.sub(P, 1, 11) == 'jobs:{user:'
end

-- Milliseconds and microseconds of this server's clock.
local function clock()
  local time = redis.call('TIME')
  local us = time[1] * 1000000 + time[2]
  return math.floor(us / 1000), us
end

-- A growing number: the time in microseconds, unless the clock has stepped back or stood still.
local function sequence(us, last)
  if last and tonumber(last) >= us then us = tonumber(last) + 1 end
  redis.call('HSET', META, 'sequence', us)
  return us
end

-- Wakes one idle runner that serves all queues, and one that serves this queue by name.
local function ring(queue)
  for _, bell in ipairs({P .. 'bell', P .. 'bell:' .. queue}) do
    if redis.call('LLEN', bell) == 0 then redis.call('LPUSH', bell, '1') end
  end
end

-- Sets where a lane stands among its queue's lanes, by the score of its first job. `pass`: where the queue stands
-- among the queues, for a caller who knows.
local function settle_lane(queue, name, pass)
  local lanes = P .. 'lanes:' .. queue
  local head = redis.call('ZRANGE', P .. 'lane:' .. queue .. ':' .. name, 0, 0, 'WITHSCORES')
  if head[1] then
    redis.call('ZADD', lanes, head[2], name)
    return
  end
  redis.call('ZREM', lanes, name)
  if redis.call('EXISTS', lanes) == 0 then
    pass = pass or redis.call('ZSCORE', P .. 'ready', queue)
    if pass then redis.call('HSET', META, 'pass:' .. queue, pass) end
    redis.call('ZREM', P .. 'ready', queue)
  end
end

-- Puts a job into its lane. A queue that was empty comes back level with the others: it saves up no turns.
-- `pass`: where it stood when it ran empty (false: never), for a caller who knows.
local function shelve(id, queue, name, score, pass)
  redis.call('ZADD', P .. 'lane:' .. queue .. ':' .. name, score, id)
  if redis.call('ZADD', P .. 'lanes:' .. queue, 'LT', score, name) == 1 then -- a queue with a lane has its place
    if pass == nil then pass = redis.call('HGET', META, 'pass:' .. queue) end
    pass = tonumber(pass or 0)
    local first = redis.call('ZRANGE', P .. 'ready', 0, 0, 'WITHSCORES')
    if first[2] and tonumber(first[2]) > pass then pass = tonumber(first[2]) end
    redis.call('ZADD', P .. 'ready', 'NX', pass, queue)
  end
  ring(queue)
end

-- Puts a job where it waits: among the delayed ones until it is due, else into its lane.
local function place(id, now)
  local job = redis.call('HMGET', P .. 'job:' .. id, 'queue', 'name', 'score', 'due')
  if not job[1] then return end
  if tonumber(job[4]) > now then
    redis.call('HSET', P .. 'job:' .. id, 'state', 'delayed')
    redis.call('ZADD', P .. 'delayed', job[4], id)
    -- Idle runners know only the time of the first one.
    if redis.call('ZRANGE', P .. 'delayed', 0, 0)[1] == id then ring(job[1]) end
    return
  end
  redis.call('HSET', P .. 'job:' .. id, 'state', 'waiting')
  shelve(id, job[1], job[2], job[3])
end

-- Moves what is due into its lanes. Returns ms until the next one is due; -1: there is none.
local function promote(now)
  local first = redis.call('ZRANGE', P .. 'delayed', 0, 0, 'WITHSCORES')
  if not first[1] then return -1 end
  if tonumber(first[2]) > now then return tonumber(first[2]) - now end
  for _, id in ipairs(redis.call('ZRANGE', P .. 'delayed', '-inf', now, 'BYSCORE', 'LIMIT', 0, 100)) do
    redis.call('ZREM', P .. 'delayed', id)
    place(id, now)
  end
  first = redis.call('ZRANGE', P .. 'delayed', 0, 0, 'WITHSCORES')
  if not first[1] then return -1 end
  return math.max(0, tonumber(first[2]) - now)
end

-- What this script has still to add to the counts of running jobs: type → node → number. When one job ends and
-- the next of its type begins, that is nothing.
local counts = {}

local function count(name, node, by)
  local nodes = counts[name] or {}
  counts[name] = nodes
  nodes[node] = (nodes[node] or 0) + by
end

-- To be called before the counts are read, and at the end of a script that lets jobs go or takes them.
local function write_counts()
  for name, nodes in pairs(counts) do
    for node, by in pairs(nodes) do
      if by ~= 0 then redis.call('HINCRBY', P .. 'running:' .. name, node, by) end
    end
  end
  counts = {}
end

-- A runner no longer has a job: what it counted for is free again, and if its type had a limit when it
-- was claimed, someone may wait for that.
local function let_go(runner, id, queue, name, node, limited)
  redis.call('SREM', P .. 'held:' .. runner, id)
  count(name, node, -1)
  if limited == '1' then ring(queue) end
end

-- Puts a job whose time has come into its lane, however Valkey's clock has stepped since.
local function place_now(id, now)
  local key = P .. 'job:' .. id
  if tonumber(redis.call('HGET', key, 'due') or 0) > now then redis.call('HSET', key, 'due', now) end
  place(id, now)
end

-- A job has ended for good: its unique key is free, and the next of its group may run.
local function close(id, unique, group, now)
  if unique and redis.call('GET', P .. 'unique:' .. unique) == id then
    redis.call('DEL', P .. 'unique:' .. unique)
  end
  if group then
    local line = P .. 'group:' .. group
    local was_first = redis.call('ZRANGE', line, 0, 0)[1] == id
    redis.call('ZREM', line, id)
    local first = redis.call('ZRANGE', line, 0, 0)[1]
    if was_first and first then
      local times = redis.call('HMGET', P .. 'job:' .. first, 'due', 'queued_at')
      local delayed = times[1] ~= times[2]
      if delayed then place(first, now) else place_now(first, now) end
    end
  end
end

-- Tells what became of a job: to the stream of events, and with `result` to those who wait for it.
local function tell(kind, id, name, queue, attempt, result)
  local most = of_user() and USERS_EVENTS or 10000
  redis.call('XADD', P .. 'events', 'MAXLEN', '~', most, '*', 'kind', kind, 'job', id, 'name', name,
    'queue', queue, 'attempt', attempt)
  if of_user() then redis.call('EXPIRE', P .. 'events', USERS_EVENTS_LIVE) end
  if result then redis.call('PUBLISH', P .. 'done:' .. id, result) end
end

-- Enqueues the job that handles the failure of another one, in the same step as that failure: whatever
-- dies now, the handler runs. It is an ordinary job, named by the producer of the first.
local function hand_over(id, name, queue, attempt, handler, result)
  local failure = cjson.decode(result).failure
  local now, us = clock()
  local score = sequence(us, redis.call('HGET', META, 'sequence'))
  local own = id .. ':failed:' .. string.format('%.0f', score) -- it may fail again after a requeue
  local body = cjson.encode({type = 'job', v = 1, job_id = own, name = handler, queue = queue, priority = 0,
    idempotent = true, args = {job_id = id, name = name, attempt = tonumber(attempt), failure = failure}})
  redis.call('HSET', P .. 'job:' .. own, 'body', body, 'name', handler, 'queue', queue, 'priority', 0,
    'idempotent', 1, 'score', score, 'due', now, 'queued_at', now, 'attempt', 0, 'crashes', 0)
  place(own, now)
end

-- Forgets the oldest of a user's failed jobs, if there are too many.
local function thin_failed()
  for _, id in ipairs(redis.call('ZRANGE', P .. 'failed', 0, -USERS_FAILED - 1)) do
    redis.call('ZREM', P .. 'failed', id)
    if redis.call('HGET', P .. 'job:' .. id, 'state') == 'failed' then redis.call('DEL', P .. 'job:' .. id) end
  end
end

-- Ends a job as failed, cancelled or done, with its result. A failed one is kept to be looked at. `job`
-- holds its name, queue, attempt, unique key and group.
local function conclude(status, id, job, result, ttl, retention)
  local key = P .. 'job:' .. id
  if status == 'failed' then
    redis.call('HSET', key, 'state', 'failed', 'failure', result)
    redis.call('EXPIRE', key, retention)
    redis.call('ZADD', P .. 'failed', (clock()), id)
    if of_user() then thin_failed() end
    local handler = redis.call('HGET', key, 'on_failed')
    if handler then hand_over(id, job[1], job[2], job[3], handler, result) end
  else
    redis.call('DEL', key)
  end
  redis.call('SET', P .. 'result:' .. id, result, 'EX', ttl)
  tell(status, id, job[1], job[2], job[3], result)
  if job[4] or job[5] then close(id, job[4], job[5], (clock())) end
end
