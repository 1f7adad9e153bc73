"""Everything outside our processes: settings, database, vault, launchers, exchange, local stack, CLI."""

import os

# With these prometheus_client counts in memory-mapped files, and a full disk then kills who counts (SIGBUS).
for _name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
    os.environ.pop(_name, None)
