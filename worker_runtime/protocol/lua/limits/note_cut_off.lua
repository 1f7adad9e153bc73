#!lua flags=allow-oom
-- Notes the passwords of a fleet that was cut off, also on a server whose memory that fleet has filled.
--
-- KEYS[1] logins     berth:cut-off-logins:<tag>
-- ARGV[1…] SHA-256 of the passwords
--
-- Returns how many of them were new.
return redis.call('SADD', KEYS[1], unpack(ARGV))
