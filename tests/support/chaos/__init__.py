"""Contains faults for a running system, streams of orders, and the judge of the ledger."""
