"""The parts of `berth chaos jobs`: runners, their lines to Valkey with a trap on each, and the judge."""
