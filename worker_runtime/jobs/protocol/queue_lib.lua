-- What the scripts of the job queue share. It is loaded before each of them and does nothing by itself.
--
-- Every key carries one hash tag ('jobs' for the fleet, 'user:<id>' for a user's own jobs, 'app:<name>' for an
-- application's). The prefix 'jobs:{tag}:'
-- is taken from the key of the settings, KEYS[1] of each script. worker_runtime/jobs/protocol/keys.py lists the keys.
local P, META

-- A user may leave this much on a server that also holds the leases. The fleet's jobs are our own.
local USERS_FAILED, USERS_EVENTS, USERS_EVENTS_TTL = 50, 100, 86400

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

-- The time in microseconds, or one more than the last if the clock has not advanced.
local function after(us, last)
  if last and tonumber(last) >= us then us = tonumber(last) + 1 end
  return us
end

-- A number that grows with each call.
local function sequence(us, last)
  us = after(us, last)
  redis.call('HSET', META, 'sequence', us)
  return us
end

-- Queues whose doorbells this script has rung: nobody takes a ring before the script has ended.
local rung = {}

-- Wakes one idle runner that serves all queues, and one that serves this queue by name.
local function ring(queue)
  if rung[queue] then return end
  rung[queue] = true
  for _, doorbell in ipairs({P .. 'doorbell', P .. 'doorbell:' .. queue}) do
    if redis.call('LLEN', doorbell) == 0 then redis.call('LPUSH', doorbell, '1') end
  end
end

local function ring_all()
  for _, queue in ipairs(redis.call('ZRANGE', P .. 'ready', 0, -1)) do ring(queue) end
end

-- Sends a message to one runner.
local function send_mail(runner, message)
  local mailbox = P .. 'mailbox:' .. runner
  redis.call('LPUSH', mailbox, message)
  redis.call('EXPIRE', mailbox, 3600)
end

-- Updates a subqueue's place in its queue, by the score of its first job; removes it if it is empty.
-- `pass`: the queue's turns so far, if the caller knows.
local function update_subqueue(queue, name, pass)
  local subqueues = P .. 'subqueues:' .. queue
  local head = redis.call('ZRANGE', P .. 'subqueue:' .. queue .. ':' .. name, 0, 0, 'WITHSCORES')
  if head[1] then
    redis.call('ZADD', subqueues, head[2], name)
    return
  end
  redis.call('ZREM', subqueues, name)
  if redis.call('EXISTS', subqueues) == 0 then
    pass = pass or redis.call('ZSCORE', P .. 'ready', queue)
    if pass then redis.call('HSET', META, 'pass:' .. queue, pass) end
    redis.call('ZREM', P .. 'ready', queue)
  end
end

-- Adds a job to its subqueue. A queue that was empty comes back with the turns it had; a claim brings it up.
-- `pass`: its turns when it ran empty (false: it never did), if the caller knows.
local function push_job(id, queue, name, score, pass)
  redis.call('ZADD', P .. 'subqueue:' .. queue .. ':' .. name, score, id)
  if redis.call('ZADD', P .. 'subqueues:' .. queue, 'LT', score, name) == 1 then -- new: the queue may have been empty
    if pass == nil then pass = redis.call('HGET', META, 'pass:' .. queue) end
    redis.call('ZADD', P .. 'ready', 'NX', pass or 0, queue)
  end
  ring(queue)
end

-- Puts a job among the delayed ones until it is due, or else into its subqueue.
local function enter_queue(id, now)
  local queue, name, score, due = unpack(redis.call('HMGET', P .. 'job:' .. id, 'queue', 'name', 'score', 'due'))
  if not queue then return end
  if tonumber(due) > now then
    redis.call('HSET', P .. 'job:' .. id, 'state', 'delayed')
    redis.call('ZADD', P .. 'delayed', due, id)
    -- Idle runners know only when the first delayed job is due.
    if redis.call('ZRANGE', P .. 'delayed', 0, 0)[1] == id then ring(queue) end
    return
  end
  redis.call('HSET', P .. 'job:' .. id, 'state', 'waiting')
  push_job(id, queue, name, score)
end

-- Puts a job into its subqueue now, however Valkey's clock has stepped.
local function enter_queue_now(id, now)
  local key = P .. 'job:' .. id
  if tonumber(redis.call('HGET', key, 'due') or 0) > now then redis.call('HSET', key, 'due', now) end
  enter_queue(id, now)
end

-- Moves delayed jobs that are due into their subqueues. Returns ms until the next one is due; -1: there is none.
local function promote(now)
  local first = redis.call('ZRANGE', P .. 'delayed', 0, 0, 'WITHSCORES')
  if not first[1] then return -1 end
  if tonumber(first[2]) > now then return tonumber(first[2]) - now end
  for _, id in ipairs(redis.call('ZRANGE', P .. 'delayed', '-inf', now, 'BYSCORE', 'LIMIT', 0, 100)) do
    redis.call('ZREM', P .. 'delayed', id)
    enter_queue(id, now)
  end
  first = redis.call('ZRANGE', P .. 'delayed', 0, 0, 'WITHSCORES')
  if not first[1] then return -1 end
  return math.max(0, tonumber(first[2]) - now)
end

-- A type of an application is in the queue with its version ('shop/resize@2'); limits, rates and counts of
-- running jobs are those of all versions.
local function all_versions(name)
  local at = string.find(name, '@', 1, true)
  return at and string.sub(name, 1, at - 1) or name
end

-- What this script has still to add to the counts of running jobs: type → node → number. It is nothing when one
-- job ends and the next of its type begins.
local counts = {}

local function count(name, node, by)
  name = all_versions(name)
  local nodes = counts[name] or {}
  counts[name] = nodes
  nodes[node] = (nodes[node] or 0) + by
end

-- To be called before the counts are read, and at the end of every script that changes them.
local function write_counts()
  for name, nodes in pairs(counts) do
    for node, by in pairs(nodes) do
      -- Nodes come and go: a count of 0 would stay for ever.
      if by ~= 0 and redis.call('HINCRBY', P .. 'running:' .. name, node, by) == 0 then
        redis.call('HDEL', P .. 'running:' .. name, node)
      end
    end
  end
  counts = {}
end

-- Takes a job from the runner that held it. If its type had a limit when it was claimed, another runner may wait
-- for this.
local function stop_holding(runner, id, queue, name, node, limited)
  redis.call('SREM', P .. 'held:' .. runner, id)
  count(name, node, -1)
  if limited == '1' then ring(queue) end
end

-- Frees the unique key of a job that has ended, and lets the next job of its group run.
local function free_keys(id, unique, group, now)
  if unique and redis.call('GET', P .. 'unique:' .. unique) == id then
    redis.call('DEL', P .. 'unique:' .. unique)
  end
  if group then
    local members = P .. 'group:' .. group
    local was_first = redis.call('ZRANGE', members, 0, 0)[1] == id
    redis.call('ZREM', members, id)
    local first = redis.call('ZRANGE', members, 0, 0)[1]
    if was_first and first then
      local times = redis.call('HMGET', P .. 'job:' .. first, 'due', 'queued_at')
      local delayed = times[1] ~= times[2]
      if delayed then enter_queue(first, now) else enter_queue_now(first, now) end
    end
  end
end

-- Adds what became of a job to the stream of events, and publishes `result`, if given, to those who wait for it.
local function publish_event(kind, id, name, queue, attempt, result)
  local max_events = of_user() and USERS_EVENTS or 10000
  redis.call('XADD', P .. 'events', 'MAXLEN', '~', max_events, '*', 'kind', kind, 'job', id, 'name', name,
    'queue', queue, 'attempt', attempt)
  if of_user() then redis.call('EXPIRE', P .. 'events', USERS_EVENTS_TTL) end
  if result then redis.call('PUBLISH', P .. 'done:' .. id, result) end
end

-- Ends a job as failed, cancelled or done, with its result. A failed one is kept for operators. `job` holds its
-- name, queue, attempt, unique key and group.
local function end_job(status, id, job, result, ttl, retention)
  local key = P .. 'job:' .. id
  local name, queue, attempt, unique, group = unpack(job, 1, 5)
  if status == 'failed' then
    redis.call('HSET', key, 'state', 'failed', 'failure', result)
    redis.call('EXPIRE', key, retention)
    local now = clock()
    redis.call('ZADD', P .. 'failed', now, id)
    if redis.call('HEXISTS', key, 'on_failed') == 1 then redis.call('ZADD', P .. 'handlers', now, id) end
    -- Of a user only the newest are kept.
    for _, old in ipairs(of_user() and redis.call('ZRANGE', P .. 'failed', 0, -USERS_FAILED - 1) or {}) do
      redis.call('ZREM', P .. 'failed', old)
      if redis.call('HGET', P .. 'job:' .. old, 'state') == 'failed' then redis.call('DEL', P .. 'job:' .. old) end
    end
  else
    redis.call('DEL', key)
  end
  redis.call('SET', P .. 'result:' .. id, result, 'EX', ttl)
  publish_event(status, id, name, queue, attempt, result)
  if unique or group then free_keys(id, unique, group, (clock())) end
end
