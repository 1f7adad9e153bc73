"""Runs workers as ECS tasks, and turns ECS's refusals into our errors.

Not here: the number of EC2 hosts (`infra/hosts/ecs.py`), and the cluster itself (`infra/aws`).
"""
