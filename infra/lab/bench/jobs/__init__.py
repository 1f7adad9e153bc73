"""The parts of `berth bench jobs`: our runners, the peers and the floors, with the same jobs."""
