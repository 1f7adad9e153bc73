"""`berth chaos`: faults are injected into a system of its own, and its orders and jobs are judged."""
