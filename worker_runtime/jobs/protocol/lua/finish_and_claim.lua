-- Writes the ends of a runner's jobs and claims its next ones, in one step.
-- One script, because a script costs as much to open as two calls, and because the count of running jobs need
-- not be written when one job ends and another of its type begins.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV[1] runner
-- ARGV[2] number of this claim, growing: a claim that arrives late has an older number, and takes nothing
-- ARGV[3] node of the runner
-- ARGV[4] how many jobs to claim at most
-- ARGV[5] 1 if there are other runners, which may have to be woken
-- ARGV[6] queues that the runner serves, comma separated; '*' means all
-- ARGV[7] how many plain jobs to claim beyond that
-- ARGV[8] types that are brief, comma separated
-- ARGV[9] seconds that a failed job is kept
-- ARGV[10] ms of waiting that one step of priority is worth, unless the settings say otherwise
-- ARGV[11] jobs of one receiver that this runner may hold at once; 0: no limit
-- ARGV[12] the receivers of the jobs that it holds, JSON: receiver → number; '' for none
-- ARGV[13…] the ends, seven values each:
--   job id
--   fencing number of the claim
--   'done', 'failed', 'cancelled' or 'retry'
--   the result as JSON; for 'retry' that of this attempt
--   seconds that the result is kept
--   ms until a retry
--   1 if the job's process died or was killed, else 0
--
-- Each claimed job gets a lease (the runner's), a fencing number and an attempt. Among queues, the one with the
-- fewest turns for its weight comes first (stride scheduling). Inside a queue the lowest score comes first, among
-- the subqueues whose limits leave room. A subqueue holds the jobs of one type, so a type at its limit is skipped
-- with one check, however many of its jobs wait.
-- A type may have a rate for each of its rate keys (GCRA). A job of an own type that names none has the key 'all', so
-- that an operator's rate holds for a type that declares none. A job that comes too early is given a time of its own,
-- once, and waits for it among the delayed jobs, so that no claim looks at it before.
--
-- A job may name its receiver: the server of a stranger, which may be slow. A runner holds only so many jobs of one
-- receiver. Those beyond are parked (a parked job waits for its receiver), out of the way of others, until the
-- runner has room for one of that receiver.
--
-- A runner may prefetch: claim plain jobs beyond its free slots, but none behind a job that is not plain.
-- A job is plain if all of this is true:
--   its type is brief, and has no limit and no rate;
--   it may run twice;
--   it has no group, no unique key and no receiver;
--   it has seen no crash.
-- So nobody waits for its end, and a job that kills its runners takes no others with it.
--
-- The ends may be repeated, also by a claim that arrives late. Returns what became of each end: 'done', 'failed',
-- 'cancelled', 'retry', or 'gone' if the caller no longer holds it (another runner took it over, or it has ended
-- before). Then nil if nothing was to be claimed, else
-- {'jobs' or 'empty' or 'suspended' or 'stale' or 'lost', ms until a delayed job is due or -1,
-- {id, job, fence, attempt, crashes, ms since it was due, 1 if it is plain}, …}.
-- 'stale': the number is too old. 'lost': the runner is not registered.
open(KEYS[1])
local runner, number, node, max_jobs, others, queues = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5] == '1', ARGV[6]
local prefetch, brief, retention, boost = tonumber(ARGV[7]), ARGV[8], ARGV[9], ARGV[10]
local receiver_limit, receivers = tonumber(ARGV[11]), ARGV[12]

-- Ends one run if the runner still holds it. The fencing number decides, together with the runner, because fencing
-- numbers start again when Valkey has lost its data. A repeat does nothing. If someone has cancelled the job, a
-- retry becomes its cancellation.
local function finish(id, fence, outcome, result, ttl, delay, crashed)
  local key = P .. 'job:' .. id
  local job = redis.call('HMGET', key, 'name', 'queue', 'attempt', 'unique', 'group', 'fence', 'state', 'node',
    'limited', 'runner')
  local name, queue, attempt = unpack(job, 1, 3)
  local current_fence, state, holder_node, limited, holder = unpack(job, 6, 10)
  if current_fence ~= fence or state ~= 'running' or holder ~= runner then
    -- Valkey lost its data while the job ran: its end stands all the same, so that it is not run again.
    if name or outcome == 'retry' then return 'gone' end
    if not redis.call('SET', P .. 'result:' .. id, result, 'EX', ttl, 'NX') then return 'gone' end
    redis.call('PUBLISH', P .. 'done:' .. id, result)
    return outcome
  end
  stop_holding(runner, id, queue, name, holder_node, limited)
  if outcome == 'retry' and redis.call('HEXISTS', key, 'cancelled') == 1 then outcome = 'cancelled' end
  if outcome ~= 'retry' then
    end_job(outcome, id, job, result, ttl, retention)
    return outcome
  end
  local now, us = clock()
  local priority = redis.call('HGET', key, 'priority')
  local last, queue_boost = unpack(redis.call('HMGET', META, 'sequence', 'boost:' .. queue))
  local score = sequence(us, last) + delay * 1000 - priority * (queue_boost or boost) * 1000
  redis.call('HSET', key, 'score', score, 'due', now + delay, 'failure', result)
  redis.call('HINCRBY', key, 'crashes', crashed)
  publish_event('retry', id, name, queue, attempt)
  enter_queue(id, now)
  return 'retry'
end

-- Jobs that one claim may put off for their rate or receiver: more would hold up the server.
local MAX_PUT_OFF = 200
-- Queues and types that one claim of a user's runner looks at: the user's worker may have made up ten thousand of them,
-- and nobody else is served meanwhile. 20,000 looks take 10 ms.
local MAX_LOOKS = 20000
-- Receivers with parked jobs that one claim looks at.
local MAX_RECEIVERS = 50

-- Indices of `settings`. One call reads all that concern a subqueue, because each call costs about 3 us.
local HALT, HALT_RUNNER, HALT_QUEUE, WEIGHT, LIMIT, NODE_LIMIT, RATE = 1, 2, 3, 4, 5, 6, 7

local function items_of(list)
  local items = {}
  for item in string.gmatch(list, '[^,]+') do items[#items + 1] = item end
  return items
end

local function set_of(list)
  local set = {}
  for item in string.gmatch(list, '[^,]+') do set[item] = true end
  return set
end

-- Claims as many jobs as the caller may hold. Returns the last part of the reply.
-- The functions of a claim are inside this one and share its variables: at the top level they cost each call 3 us,
-- because Lua looks up all that they share anew for each of them.
local function claim_jobs()
  local entry = P .. 'runner:' .. runner
  local last_number, runner_name, announced = unpack(redis.call('HMGET', entry, 'number', 'name', 'manifests'))
  if not last_number then return {'lost', -1} end
  if tonumber(last_number) >= tonumber(number) then return {'stale', -1} end
  local now = clock()
  local manifests = announced and items_of(announced) -- without any the runner takes all types (publish.lua)
  local served, is_brief = set_of(queues), set_of(brief)
  local receiving = receivers ~= '' and cjson.decode(receivers) or {}

  -- These change while the runner claims.
  local all_plain = true -- of the jobs that were claimed, or considered for prefetching
  local suspended = false -- the whole queue, or runners of this name
  local put_off = 0 -- jobs that were delayed for their rate, or parked
  local looks = 0 -- one for a queue, ten for a type
  local taken = {} -- type → whether the runner takes its jobs
  local passed_on = {} -- type → true if another runner was woken for it
  local known_settings = {} -- queue and type → settings

  local function serves(queue)
    return served['*'] or served[queue]
  end

  local function announces(manifests, name)
    for _, digest in ipairs(manifests) do
      if redis.call('SISMEMBER', P .. 'types:' .. digest, name) == 1 then return true end
    end
    return false
  end

  -- Whether this runner takes jobs of this type: asked for each prefetched job, mostly of one type.
  local function takes(name)
    if taken[name] == nil then taken[name] = not manifests or announces(manifests, name) end
    return taken[name]
  end

  -- Wakes an idle runner that has announced this type: the ring for its job may have come to this one.
  local function pass_on(name)
    if not others or passed_on[name] then return end
    passed_on[name] = true
    for _, other in ipairs(redis.call('HKEYS', P .. 'beats')) do
      local state, announced = unpack(redis.call('HMGET', P .. 'runner:' .. other, 'state', 'manifests'))
      if other ~= runner and state == 'idle' and announces(items_of(announced or ''), name)
        and redis.call('LLEN', P .. 'mailbox:' .. other) == 0 then
        send_mail(other, 'check')
        return
      end
    end
  end

  -- Returns the settings of a subqueue, which are the same for all jobs of this claim.
  local function read_settings(queue, name)
    local subqueue = queue .. ' ' .. name
    if not known_settings[subqueue] then
      name = all_versions(name)
      known_settings[subqueue] = redis.call('HMGET', META, 'halt', 'halt_runner:' .. runner_name, 'halt_queue:' .. queue,
        'weight:' .. queue, 'limit:' .. name, 'node_limit:' .. name, 'rate:' .. name)
    end
    return known_settings[subqueue]
  end

  -- Whether the limits of a type leave room for one more job.
  local function has_room(name, settings)
    if not settings[LIMIT] and not settings[NODE_LIMIT] then return true end
    write_counts()
    name = all_versions(name)
    if settings[LIMIT] then
      local running = 0
      for _, jobs in ipairs(redis.call('HVALS', P .. 'running:' .. name)) do running = running + jobs end
      if running >= tonumber(settings[LIMIT]) then return false end
    end
    if not settings[NODE_LIMIT] then return true end
    return tonumber(redis.call('HGET', P .. 'running:' .. name, node) or 0) < tonumber(settings[NODE_LIMIT])
  end

  -- Returns how many more jobs of this receiver the runner may hold.
  local function receiver_room(receiver)
    if receiver_limit == 0 then return math.huge end
    return receiver_limit - (receiving[receiver] or 0)
  end

  -- Parks a job whose receiver has as many jobs here as it may have.
  local function park(id, queue, receiver, score)
    local place = queue .. ' ' .. receiver
    redis.call('ZADD', P .. 'parked:' .. place, score, id)
    redis.call('ZADD', P .. 'parked', 'NX', now, place)
    put_off = put_off + 1
  end

  -- Brings parked jobs back to their subqueues, as many as this runner has room for. The receivers that were looked at
  -- come last the next time.
  local function unpark()
    for _, place in ipairs(redis.call('ZRANGE', P .. 'parked', 0, MAX_RECEIVERS - 1)) do
      local queue, receiver = string.match(place, '^(%S+) (%S+)$')
      if serves(queue) then
        local room = math.min(max_jobs, receiver_room(receiver))
        if room > 0 then
          local back = redis.call('ZPOPMIN', P .. 'parked:' .. place, room)
          for at = 1, #back, 2 do
            local id, score = back[at], back[at + 1]
            local name, state = unpack(redis.call('HMGET', P .. 'job:' .. id, 'name', 'state'))
            if state == 'waiting' then push_job(id, queue, name, score) end
          end
          if redis.call('EXISTS', P .. 'parked:' .. place) == 0 then redis.call('ZREM', P .. 'parked', place) end
        end
        if redis.call('ZSCORE', P .. 'parked', place) then redis.call('ZADD', P .. 'parked', now, place) end
      end
    end
  end

  -- True if the job comes too early for its rate. It is delayed until the time that it is given.
  local function too_early(id, name, settings)
    local key = P .. 'job:' .. id
    local rate_key, granted = unpack(redis.call('HMGET', key, 'rate', 'granted'))
    if granted then return false end
    if not rate_key then
      if not string.find(name, '/', 1, true) then return false end
      rate_key = 'all'
    end
    name = all_versions(name)
    local bucket = P .. 'rate:' .. name .. ':' .. rate_key
    local interval = tonumber(settings[RATE])
    local burst = tonumber(redis.call('HGET', META, 'rate_burst:' .. name) or 1)
    local free, written = string.match(redis.call('GET', bucket) or '0 0', '^(%S+) ?(%S*)')
    local back = math.max(0, (tonumber(written) or 0) - now) -- how far Valkey's clock has stepped back since
    free = math.max(now, free - back)
    local due = free - interval * (burst - 1)
    -- With the fraction of an interval: a whole number would lose it at rates beyond 1,000 a second.
    redis.call('SET', bucket, string.format('%.3f %.0f', free + interval, now), 'PX',
      math.ceil(free + interval - now) + 1000)
    if due <= now then return false end
    redis.call('HSET', key, 'due', math.ceil(due), 'granted', 1)
    enter_queue(id, now)
    put_off = put_off + 1
    return true
  end

  -- Brings up a queue that was suspended, at a limit or served alone: it is moved up to one turn behind the last
  -- queue, so it neither saves up turns nor has others pay for theirs. Mostly one comparison.
  -- `ready`: each queue, followed by its turns.
  local function catch_up(queue, pass, ready)
    if tonumber(ready[#ready]) - pass <= 1 then return end
    local behind = pass
    for at = 1, #ready, 2 do
      local other, turns = ready[at], ready[at + 1]
      local level = turns - 1 / (redis.call('HGET', META, 'weight:' .. other) or 1)
      if serves(other) and level < math.huge then pass = math.max(pass, level) end
    end
    if pass > behind then redis.call('ZADD', P .. 'ready', string.format('%.17g', pass), queue) end
  end

  -- Gives a job to this runner (`stop_holding` takes it away). Returns its fencing number.
  local function start_holding(id, name, attempt, limited)
    local key = P .. 'job:' .. id
    local fence = redis.call('HINCRBY', META, 'fence', 1)
    redis.call('HSET', key, 'state', 'running', 'runner', runner, 'node', node, 'fence', fence,
      'attempt', attempt, 'started_at', now)
    -- The field stays for later claims: if the limit is gone by then, it costs one ring in vain.
    if limited then redis.call('HSET', key, 'limited', 1) end
    redis.call('SADD', P .. 'held:' .. runner, id)
    count(name, node, 1)
    return fence
  end

  -- Claims the first job of a subqueue. Returns nil if it was put off, or must not be prefetched.
  -- `pass`, `ready`: the queue's turns, and those of all.
  local function take(queue, name, settings, prefetching, pass, ready)
    local subqueue = P .. 'subqueue:' .. queue .. ':' .. name
    local id, score = unpack(redis.call('ZPOPMIN', subqueue))
    local key = P .. 'job:' .. id
    local job, attempt, crashes, due, idempotent, group, unique, receiver = unpack(redis.call('HMGET', key, 'body',
      'attempt', 'crashes', 'due', 'idempotent', 'group', 'unique', 'receiver'))
    local limited = settings[LIMIT] or settings[NODE_LIMIT]
    local plain = is_brief[name] and not limited and not settings[RATE] and crashes == '0' and idempotent == '1'
      and not group and not unique and not receiver
    if not plain then
      all_plain = false
      if prefetching then
        redis.call('ZADD', subqueue, score, id)
        return nil
      end
    end
    if receiver and receiver_room(receiver) <= 0 then
      park(id, queue, receiver, score)
      update_subqueue(queue, name)
      return nil
    end
    catch_up(queue, tonumber(pass), ready)
    update_subqueue(queue, name, redis.call('ZINCRBY', P .. 'ready', 1 / (settings[WEIGHT] or 1), queue))
    if not job then return nil end -- somebody deleted it by hand
    if settings[RATE] then
      if too_early(id, name, settings) then return nil end
      redis.call('HDEL', key, 'granted') -- another attempt needs another grant
    end
    attempt = attempt + 1
    local fence = start_holding(id, name, attempt, limited)
    if receiver then receiving[receiver] = (receiving[receiver] or 0) + 1 end
    return {id, job, fence, attempt, tonumber(crashes), math.max(0, now - tonumber(due)), plain and 1 or 0}
  end

  -- Claims one job of the queue whose turn it is. Returns nil if none can run now, or none may be prefetched.
  local function claim_next(prefetching)
    local ready = redis.call('ZRANGE', P .. 'ready', 0, -1, 'WITHSCORES')
    looks = looks + #ready / 2
    if looks > MAX_LOOKS and of_user() then return nil end
    for at = 1, #ready, 2 do
      local queue, pass = ready[at], ready[at + 1]
      if serves(queue) then
        for _, name in ipairs(redis.call('ZRANGE', P .. 'subqueues:' .. queue, 0, -1)) do
          local settings = read_settings(queue, name)
          looks = looks + 10
          if looks > MAX_LOOKS and of_user() then return nil end
          suspended = (settings[HALT] or settings[HALT_RUNNER]) and true
          if suspended then return nil end
          if settings[HALT_QUEUE] then break end
          if not takes(name) then
            pass_on(name)
          elseif has_room(name, settings) then
            local job = take(queue, name, settings, prefetching, pass, ready)
            if job or (prefetching and not all_plain) or put_off >= MAX_PUT_OFF then return job end
            return claim_next(prefetching)
          end
        end
      end
    end
    return nil
  end

  local reply = {'empty', promote(now)}
  if max_jobs > 0 and redis.call('EXISTS', P .. 'parked') == 1 then unpark() end
  local claimed = 0
  while claimed < max_jobs + prefetch do
    local prefetching = claimed >= max_jobs
    if prefetching and not all_plain then break end
    local job = claim_next(prefetching)
    if not job then break end
    claimed = claimed + 1
    reply[2 + claimed] = job
  end
  if claimed > 0 then reply[1] = 'jobs' end
  if suspended then reply[1] = 'suspended' end
  if put_off > 0 then reply[2] = put_off >= MAX_PUT_OFF and 0 or promote(now) end
  local busy = reply[1] == 'jobs' or redis.call('EXISTS', P .. 'held:' .. runner) == 1
  local state = busy and 'busy' or suspended and 'suspended' or 'idle'
  redis.call('HSET', entry, 'number', number, 'state', state)
  -- A ring wakes one runner. It wakes the next one if work is left.
  if reply[1] == 'jobs' and others then ring_all() end
  return reply
end

local reply = {}
for at = 13, #ARGV, 7 do reply[#reply + 1] = finish(unpack(ARGV, at, at + 6)) end
reply[#reply + 1] = max_jobs + prefetch > 0 and claim_jobs()
write_counts()
return reply
