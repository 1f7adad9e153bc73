"""The parts of `berth bench heartbeat`: a real worker, the naive design, the load, and the watch on both."""
