"""Where user workers run: the launcher port and its adapters."""
