"""Adapts SinoPac's Shioaji to the broker port.

Not here: the SDK itself, which is a package of its own (`infra/images/install_shioaji.py`).
"""
