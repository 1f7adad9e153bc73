"""What workflows do to the world, and the orchestrator that hosts both."""
