"""The naive design that the `idle` benchmark runs beside ours: a workflow per user, a look a minute."""
