"""Tests the launcher port: the fake, the node, Docker and ECS."""
