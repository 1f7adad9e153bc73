"""Attacks a whole system with what an attacker may have got hold of."""
