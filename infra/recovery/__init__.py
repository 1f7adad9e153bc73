"""Backups, and the way back from one."""
