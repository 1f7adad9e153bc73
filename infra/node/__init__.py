"""`berth node`: owns the worker processes of one host, so that no orchestrator is their parent."""
