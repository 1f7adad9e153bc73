"""Tests workers, pools, rollouts and the fleet over REST."""
