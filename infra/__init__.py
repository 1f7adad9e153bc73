"""Everything outside our processes: settings, database, vault, launchers, exchange, local stack, CLI."""
