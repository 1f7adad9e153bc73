"""Contains launchers for tests: a fake, faulty ones, a real node, and ECS on moto."""
