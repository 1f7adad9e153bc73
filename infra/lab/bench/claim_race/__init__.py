"""Claimers that are killed, and the fake workers they claim: for `berth bench claim-race`."""
