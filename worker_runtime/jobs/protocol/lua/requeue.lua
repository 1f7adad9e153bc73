-- Puts failed jobs back on their queues, as if they were new.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV[1] ms of waiting that one step of priority is worth, unless the settings say otherwise
-- ARGV[2…] job ids
--
-- Safe to repeat. Returns the ids that went back. A job that is not failed, or whose unique key another job has
-- by now, stays as it is.
open(KEYS[1])
local now, us = clock()
local back = {}
for i = 2, #ARGV do
  local id = ARGV[i]
  local key = P .. 'job:' .. id
  local job = redis.call('HMGET', key, 'state', 'queue', 'priority', 'unique', 'group')
  local free = job[1] == 'failed'
  if free and job[4] then free = redis.call('SET', P .. 'unique:' .. job[4], id, 'NX') and true or false end
  if free then
    local meta = redis.call('HMGET', META, 'sequence', 'boost:' .. job[2])
    local position = sequence(us, meta[1])
    redis.call('ZREM', P .. 'failed', id)
    redis.call('DEL', P .. 'result:' .. id)
    redis.call('PERSIST', key)
    redis.call('HDEL', key, 'failure', 'cancelled', 'runner', 'fence')
    redis.call('HSET', key, 'score', position - job[3] * (meta[2] or ARGV[1]) * 1000, 'due', now,
      'attempt', 0, 'crashes', 0, 'state', 'grouped')
    local first = true
    if job[5] then
      local members = P .. 'group:' .. job[5]
      redis.call('ZADD', members, position, id)
      first = redis.call('ZRANGE', members, 0, 0)[1] == id
    end
    if first then enter_queue(id, now) end
    back[#back + 1] = id
  end
end
return back
