-- How jobs are taken: what `claim` and `turn` share. It is put before them, behind `shelf.lua`.
--
-- Among queues: the one that has had the fewest turns for its weight (stride scheduling). Inside a queue:
-- the lowest score among the lanes (a lane holds one type of job) whose limits leave room, so that a type
-- at its limit is stepped over at the cost of a look, however many of its jobs wait.
-- A type may have a rate for each of its rate keys (GCRA): a job that comes too early is given its own time,
-- once, and waits for it among the delayed ones, so that it is not looked at again before.
--
-- Ahead, for a runner whose hands are full or that a ring wakes, only plain jobs are taken, and none behind one that
-- is not plain.
-- Plain are those of a brief type without limits or rate, which may run twice, belong to no group and have seen no
-- crash: so nobody waits for their end, and who dies with them again and again has none of them in hand.

-- Few calls, because each costs about 3 us: all settings that matter for one lane come in one.
local HALT, HALT_RUNNER, HALT_QUEUE, WEIGHT, LIMIT, NODE_LIMIT, RATE = 1, 2, 3, 4, 5, 6, 7
-- So many jobs a claim at the most are given another time: it must not hold up the server.
local MOST_PUT_OFF = 200

-- The arguments and what is returned: see `claim.lua`.
local function claim(runner, number, node, want, others, queues, ahead, brief, behind)
  local entry = P .. 'runner:' .. runner
  local seen = redis.call('HMGET', entry, 'number', 'name', 'told')
  if not seen[1] then return {'lost', -1} end
  local last = seen[1]
  if behind then last = seen[3] or 0 end
  if tonumber(last) >= tonumber(number) then return {'stale', -1} end
  local now = clock()
  local due = behind and -1 or promote(now)
  local put_off = 0
  local suspended = false

  local served = {}
  for queue in string.gmatch(queues, '[^,]+') do served[queue] = true end
  local briefly = {}
  for name in string.gmatch(brief, '[^,]+') do briefly[name] = true end
  local plain = true -- all that were taken, or looked at to be taken ahead

  local function settings(queue, name)
    return redis.call('HMGET', META, 'halt', 'halt_runner:' .. seen[2], 'halt_queue:' .. queue,
      'weight:' .. queue, 'limit:' .. name, 'node_limit:' .. name, 'rate:' .. name)
  end

  local function has_room(name, set)
    if not set[LIMIT] and not set[NODE_LIMIT] then return true end
    write_counts()
    if set[LIMIT] then
      local running = 0
      for _, jobs in ipairs(redis.call('HVALS', P .. 'running:' .. name)) do running = running + jobs end
      if running >= tonumber(set[LIMIT]) then return false end
    end
    if not set[NODE_LIMIT] then return true end
    return tonumber(redis.call('HGET', P .. 'running:' .. name, node) or 0) < tonumber(set[NODE_LIMIT])
  end

  -- True if the job comes too early for its rate; then it waits for the time it is given.
  local function too_early(id, key, name, set)
    local job = redis.call('HMGET', key, 'rate', 'granted')
    if not job[1] or job[2] then return false end
    local bucket = P .. 'rate:' .. name .. ':' .. job[1]
    local interval = tonumber(set[RATE])
    local burst = tonumber(redis.call('HGET', META, 'rate_burst:' .. name) or 1)
    local free, written = string.match(redis.call('GET', bucket) or '0 0', '^(%S+) ?(%S*)')
    local back = math.max(0, (tonumber(written) or 0) - now) -- so far Valkey's clock has stepped back since
    free = math.max(now, free - back)
    local at = free - interval * (burst - 1)
    -- A whole number, with the rest of an interval kept: %.0f would lose it at rates beyond 1,000 a second.
    redis.call('SET', bucket, string.format('%.3f %.0f', free + interval, now), 'PX',
      math.ceil(free + interval - now) + 1000)
    if at <= now then return false end
    redis.call('HSET', key, 'due', math.ceil(at), 'granted', 1)
    place(id, now)
    put_off = put_off + 1
    return true
  end

  local function take(queue, name, set, beyond)
    local lane = P .. 'lane:' .. queue .. ':' .. name
    local first = redis.call('ZPOPMIN', lane)
    local id = first[1]
    local key = P .. 'job:' .. id
    local job = redis.call('HMGET', key, 'body', 'attempt', 'crashes', 'due', 'idempotent', 'group')
    if not briefly[name] or set[LIMIT] or set[NODE_LIMIT] or set[RATE] or job[3] ~= '0' or job[5] ~= '1' or job[6] then
      plain = false
      if beyond then
        redis.call('ZADD', lane, first[2], id)
        return nil
      end
    end
    settle_lane(queue, name, redis.call('ZINCRBY', P .. 'ready', 1 / (set[WEIGHT] or 1), queue))
    if not job[1] then return nil end -- somebody deleted it by hand
    if set[RATE] then
      if too_early(id, key, name, set) then return nil end
      redis.call('HDEL', key, 'granted') -- another attempt asks again
    end
    local fence = redis.call('HINCRBY', META, 'fence', 1)
    redis.call('HSET', key, 'state', 'running', 'runner', runner, 'node', node, 'fence', fence,
      'attempt', job[2] + 1, 'started_at', now)
    -- It stays for later claims: without a limit it costs them a ring in vain.
    local limited = (set[LIMIT] or set[NODE_LIMIT]) and 1 or 0
    if limited == 1 then redis.call('HSET', key, 'limited', 1) end
    redis.call('SADD', P .. 'held:' .. runner, id)
    count(name, node, 1)
    return {id, job[1], fence, job[2] + 1, tonumber(job[3]), math.max(0, now - tonumber(job[4])), limited}
  end

  -- One job of the queue whose turn it is; nil: nothing can run now, or nothing is to be taken `beyond` what was
  -- wanted.
  local function next_job(beyond)
    for _, queue in ipairs(redis.call('ZRANGE', P .. 'ready', 0, -1)) do
      if served['*'] or served[queue] then
        for _, name in ipairs(redis.call('ZRANGE', P .. 'lanes:' .. queue, 0, -1)) do
          local set = settings(queue, name)
          suspended = (set[HALT] or set[HALT_RUNNER]) and true
          if suspended then return nil end
          if set[HALT_QUEUE] then break end
          if has_room(name, set) then
            local job = take(queue, name, set, beyond)
            if job or (beyond and not plain) or put_off >= MOST_PUT_OFF then return job end
            return next_job(beyond)
          end
        end
      end
    end
    return nil
  end

  local reply = {'empty', due}
  while #reply - 2 < want + ahead do
    local beyond = #reply - 2 >= want
    if beyond and not plain then break end
    local job = next_job(beyond)
    if not job then break end
    reply[1] = 'jobs'
    reply[#reply + 1] = job
  end
  if suspended then reply[1] = 'suspended' end
  if put_off > 0 then reply[2] = put_off >= MOST_PUT_OFF and 0 or promote(now) end
  local busy = reply[1] == 'jobs' or redis.call('EXISTS', P .. 'held:' .. runner) == 1
  local state = busy and 'busy' or suspended and 'suspended' or 'idle'
  redis.call('HSET', entry, 'number', behind and seen[1] or number, 'state', state)
  -- One ring wakes one runner; with work left for others, the next one is woken.
  if reply[1] == 'jobs' and others then
    for _, queue in ipairs(redis.call('ZRANGE', P .. 'ready', 0, -1)) do ring(queue) end
  end
  return reply
end
