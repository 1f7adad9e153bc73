-- Keeps what services know of a user's unsettled orders, before the rest of what the user's worker wrote is removed.
--
-- KEYS[1] requests   trading:user:{user}:requests
-- KEYS[2] processing trading:user:{user}:processing
-- KEYS[3] control    worker:control:{user}:messages
-- KEYS[4] doorbell   trading:user:{user}:doorbell
-- KEYS[5…] three for each order: trading:user:{user}:seen:<order>, trading:response:{user}:<order> and
--            trading:journal:{user}:<order>
-- ARGV[1] entries of a list that is kept as it is
-- ARGV[2] bytes of it, and of a string
-- ARGV[3] seconds that a journal entry is kept
--
-- A list that is too large is replaced by the orders that are found in it. An order that is not in the queue any more may
-- have been sent: it gets a journal entry, by which it counts as unknown, and is verified with the broker.
-- Safe to repeat. Returns how many orders got an entry.
-- First: after a removal the server lets a script write though its memory is full.
redis.call('UNLINK', KEYS[4])
local most_entries, most_bytes, journal_ttl = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]

-- A string that is no larger than ours; '' for none, and for any other.
local function small_string(key)
  if redis.call('TYPE', key).ok ~= 'string' or redis.call('STRLEN', key) > most_bytes then return '' end
  return redis.call('GET', key)
end

local items = {}
for n = 5, #KEYS, 3 do
  items[#items + 1] = small_string(KEYS[n])
  for _, key in ipairs({KEYS[n], KEYS[n + 1]}) do
    if small_string(key) == '' then redis.call('UNLINK', key) end
  end
end

local function keep_list(key)
  if redis.call('TYPE', key).ok ~= 'list' then
    redis.call('UNLINK', key)
    return
  end
  if redis.call('LLEN', key) <= most_entries
    and redis.call('MEMORY', 'USAGE', key, 'SAMPLES', 0) <= most_bytes then return end
  local kept = {}
  for _, item in ipairs(items) do
    if item ~= '' and redis.call('LPOS', key, item) then kept[#kept + 1] = item end
  end
  redis.call('UNLINK', key)
  for _, item in ipairs(kept) do redis.call('LPUSH', key, item) end
end
local requests, processing, control = KEYS[1], KEYS[2], KEYS[3]
for _, key in ipairs({requests, processing, control}) do keep_list(key) end

local marked = 0
for n, item in ipairs(items) do
  if item == '' or not redis.call('LPOS', requests, item) then
    redis.call('SET', KEYS[3 * n + 4], 'cut off', 'EX', journal_ttl)
    marked = marked + 1
  end
end
return marked
