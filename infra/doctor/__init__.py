"""Implements `berth doctor`: tries the servers, logins and keys of the settings.

Not here: the health that the running API reports (`api/fleet/service.py`).
"""
