-- Takes a runner's next jobs. Each gets a lease (the runner's), a fencing number and an attempt.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV[1] runner
-- ARGV[2] number of this claim, growing: an older one than the last comes late, and takes nothing
-- ARGV[3] node of the runner
-- ARGV[4] how many jobs at the most
-- ARGV[5] 1 if there are other runners, which may have to be woken
-- ARGV[6…] queues that the runner serves; '*' means all
--
-- Among queues: the one that has had the fewest turns for its weight (stride scheduling). Inside a queue:
-- the lowest score among the lanes (a lane holds one type of job) whose limits leave room, so that a type
-- at its limit is stepped over at the cost of a look, however many of its jobs wait.
-- A type may have a rate for each of its rate keys (GCRA): a job that comes too early is given its own time,
-- once, and waits for it among the delayed ones, so that it is not looked at again before.
-- Returns {'jobs' or 'empty' or 'suspended' or 'stale' or 'lost', ms until a delayed job is due or -1,
-- {id, job, fence, attempt, crashes, ms that it waited since it was due}, …}. 'lost': the runner is no longer
-- registered.
open(KEYS[1])
local runner, node, want = P .. 'runner:' .. ARGV[1], ARGV[3], tonumber(ARGV[4])
local seen = redis.call('HMGET', runner, 'number', 'name')
if not seen[1] then return {'lost', -1} end
if tonumber(seen[1]) >= tonumber(ARGV[2]) then return {'stale', -1} end
local now = clock()
local due = promote(now)

local served = {}
for i = 6, #ARGV do served[ARGV[i]] = true end

-- Few calls, because each costs about 3 us: all settings that matter for one lane come in one.
local HALT, HALT_RUNNER, HALT_QUEUE, WEIGHT, LIMIT, NODE_LIMIT, RATE, BURST = 1, 2, 3, 4, 5, 6, 7, 8
local function settings(queue, name)
  return redis.call('HMGET', META, 'halt', 'halt_runner:' .. seen[2], 'halt_queue:' .. queue,
    'weight:' .. queue, 'limit:' .. name, 'node_limit:' .. name, 'rate:' .. name,
    'rate_burst:' .. name)
end

local function has_room(name, set)
  if set[LIMIT] then
    local running = 0
    for _, count in ipairs(redis.call('HVALS', P .. 'running:' .. name)) do running = running + count end
    if running >= tonumber(set[LIMIT]) then return false end
  end
  if not set[NODE_LIMIT] then return true end
  return tonumber(redis.call('HGET', P .. 'running:' .. name, node) or 0) < tonumber(set[NODE_LIMIT])
end

-- So many jobs a claim at the most are given another time: it must not hold up the server.
local MOST_PUT_OFF = 200
local put_off = 0

-- True if the job comes too early for its rate; then it waits for the time it is given.
local function too_early(id, key, name, set)
  local job = redis.call('HMGET', key, 'rate', 'granted')
  if not job[1] or job[2] then return false end
  local bucket = P .. 'rate:' .. name .. ':' .. job[1]
  local interval = tonumber(set[RATE])
  local free = math.max(now, tonumber(redis.call('GET', bucket) or 0))
  local at = free - interval * (tonumber(set[BURST] or 1) - 1)
  -- A whole number, with the rest of an interval kept: %.0f would lose it at rates beyond 1,000 a second.
  redis.call('SET', bucket, string.format('%.3f', free + interval), 'PX', math.ceil(free + interval - now) + 1000)
  if at <= now then return false end
  redis.call('HSET', key, 'due', math.ceil(at), 'granted', 1)
  place(id, now)
  put_off = put_off + 1
  return true
end

local function take(queue, name, set)
  local id = redis.call('ZPOPMIN', P .. 'lane:' .. queue .. ':' .. name)[1]
  redis.call('ZINCRBY', P .. 'ready', 1 / (set[WEIGHT] or 1), queue)
  settle_lane(queue, name)
  local key = P .. 'job:' .. id
  local job = redis.call('HMGET', key, 'body', 'attempt', 'crashes', 'due')
  if not job[1] then return nil end -- somebody deleted it by hand
  if set[RATE] then
    if too_early(id, key, name, set) then return nil end
    redis.call('HDEL', key, 'granted') -- another attempt asks again
  end
  local fence = redis.call('HINCRBY', META, 'fence', 1)
  redis.call('HSET', key, 'state', 'running', 'runner', ARGV[1], 'node', node, 'fence', fence,
    'attempt', job[2] + 1, 'started_at', now, 'limited', (set[LIMIT] or set[NODE_LIMIT]) and 1 or 0)
  redis.call('SADD', P .. 'held:' .. ARGV[1], id)
  redis.call('HINCRBY', P .. 'running:' .. name, node, 1)
  return {id, job[1], fence, job[2] + 1, tonumber(job[3]), math.max(0, now - tonumber(job[4]))}
end

local suspended = false

-- One job of the queue whose turn it is; nil: nothing can run now.
local function next_job()
  for _, queue in ipairs(redis.call('ZRANGE', P .. 'ready', 0, -1)) do
    if served['*'] or served[queue] then
      for _, name in ipairs(redis.call('ZRANGE', P .. 'lanes:' .. queue, 0, -1)) do
        local set = settings(queue, name)
        suspended = (set[HALT] or set[HALT_RUNNER]) and true
        if suspended then return nil end
        if set[HALT_QUEUE] then break end
        if has_room(name, set) then
          local job = take(queue, name, set)
          if job then return job end
          if put_off >= MOST_PUT_OFF then return nil end
          return next_job()
        end
      end
    end
  end
  return nil
end

local reply = {'empty', due}
while #reply - 2 < want do
  local job = next_job()
  if not job then break end
  reply[1] = 'jobs'
  reply[#reply + 1] = job
end
if suspended then reply[1] = 'suspended' end
if put_off > 0 then reply[2] = put_off >= MOST_PUT_OFF and 0 or promote(now) end
local busy = reply[1] == 'jobs' or redis.call('EXISTS', P .. 'held:' .. ARGV[1]) == 1
redis.call('HSET', runner, 'number', ARGV[2], 'state', busy and 'busy' or suspended and 'suspended' or 'idle')
-- One ring wakes one runner; with work left for others, the next one is woken.
if reply[1] == 'jobs' and ARGV[5] == '1' then
  for _, queue in ipairs(redis.call('ZRANGE', P .. 'ready', 0, -1)) do ring(queue) end
end
return reply
