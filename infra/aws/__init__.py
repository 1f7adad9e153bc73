"""Describes Berth on AWS as code: CDK in Python, two stages (`make aws`).

Not here: calls of AWS at run time (`infra/launchers/ecs`, `infra/hosts/ecs.py`,
`infra/vault/kms.py`).
"""
