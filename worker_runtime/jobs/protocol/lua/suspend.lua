-- Suspends or resumes everything, a queue or a runner. A suspension lasts until it is resumed, also over restarts.
-- Running jobs go on.
--
-- KEYS[1] settings   jobs:{tag}:meta
-- ARGV[1] 'suspend' or 'resume'
-- ARGV[2] 'halt' for all, 'halt_queue:<queue>' or 'halt_runner:<name of the runner>'
--
-- Safe to repeat. Returns 1 if it changed something, else 0.
open(KEYS[1])
local changed
if ARGV[1] == 'suspend' then
  changed = redis.call('HSETNX', META, ARGV[2], (clock()))
else
  changed = redis.call('HDEL', META, ARGV[2])
end
announce_settings()
return changed
