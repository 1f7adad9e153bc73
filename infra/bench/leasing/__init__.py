"""The parts of `berth bench lease`: busy processes that renew a lease of their own."""
