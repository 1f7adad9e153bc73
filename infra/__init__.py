"""Holds everything outside our processes: settings,
servers' clients, launchers, local stack, command line.

Not here: routes (`api`), decisions (`workflows`), and what runs in a user's worker
(`worker_runtime`).
"""

import os

# With these prometheus_client counts in memory-mapped files,
# and a full disk then kills who counts (SIGBUS).
for _name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
    os.environ.pop(_name, None)
