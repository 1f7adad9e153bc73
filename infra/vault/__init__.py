"""The vault: credentials at rest, and the keys of the orchestrator."""
