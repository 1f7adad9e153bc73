"""Breaks workers, hosts and servers of a whole system; the paper exchange's ledger judges the
result."""
