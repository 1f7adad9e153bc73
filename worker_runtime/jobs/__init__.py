"""The priority job runner: queue, runner, child."""
