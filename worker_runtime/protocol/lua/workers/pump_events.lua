-- Moves events from the workers' own lists to the streams, which no worker reaches. All events go to one stream. Those
-- about a worker's state also go to a second one, which the relay reads, so that orders make no work for the relay.
-- Each worker that rang the bell has one turn in a call. If events are left, it is rung for again behind the others.
--
-- KEYS[1] events     worker:events
-- KEYS[2] bell       {worker:events}:bell
-- KEYS[3] changes    {worker:events}:changes
-- ARGV[1] prefix of the lists, {worker:events}:of:   (same slot)
-- ARGV[2] entries that are taken from one list
-- ARGV[3] rings that are taken; if more than this number are left then, all of those are dropped
-- ARGV[4] length of a list that is reported
-- ARGV[5] a worker that has a turn, too, or ''
-- ARGV[6] bytes that are taken from one list, but for its first entry
--
-- Returns {rings taken, rings that were left, announcements, {worker, length of its list…}}. An announcement is a
-- ring with a space in it. Entries are added before they are removed, so that a failure loses none.
local MAX_ENTRIES = 2000  -- of one call
local MAX_ENTRY_BYTES = 264 * 1024  -- a message has at most 256 KiB, and its MAC
local MAX_RING_BYTES = 256  -- a pool and a worker id
local CHANGE = ' {"type":"worker_event"'  -- how our workers begin such an event; any other goes to the recorder only
local bell, limit = KEYS[2], tonumber(ARGV[3])
local rings, rings_left, moved, seen, again, announced, long = 0, 0, 0, {}, {}, {}, {}
local function pump(worker)
  local list = ARGV[1] .. worker
  local items, taken, bytes = redis.pcall('LRANGE', list, 0, ARGV[2] - 1), 0, 0
  if items.err or #items == 0 then return end
  for _, item in ipairs(items) do
    if #item <= MAX_ENTRY_BYTES then
      bytes = bytes + #item
      if taken > 0 and bytes > tonumber(ARGV[6]) then break end
      redis.call('XADD', KEYS[1], '*', 'e', item)
      if string.find(item, CHANGE, 1, true) then redis.call('XADD', KEYS[3], '*', 'e', item) end
    end
    taken = taken + 1
  end
  moved = moved + taken
  redis.call('LTRIM', list, taken, -1)
  local rest = redis.call('LLEN', list)
  if rest > 0 then again[#again + 1] = worker end
  if rest > tonumber(ARGV[4]) then
    long[#long + 1] = worker
    long[#long + 1] = rest
  end
end

while rings < limit and moved < MAX_ENTRIES do
  local ring = redis.call('LPOP', bell)
  if not ring then break end
  rings = rings + 1
  if #ring <= MAX_RING_BYTES and not seen[ring] then
    seen[ring] = true
    if string.find(ring, ' ', 1, true) then announced[#announced + 1] = ring else pump(ring) end
  end
end
if limit > 0 then
  rings_left = redis.call('LLEN', bell)
  if rings_left > limit then redis.call('UNLINK', bell) end
end
if ARGV[5] ~= '' then pump(ARGV[5]) end
for _, worker in ipairs(again) do redis.call('RPUSH', bell, worker) end
return {rings, rings_left, announced, long}
