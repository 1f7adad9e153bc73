"""Tests the ECS launcher on moto's server."""
