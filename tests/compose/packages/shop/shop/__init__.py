"""The package of the jobs."""
