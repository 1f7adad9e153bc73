"""Contains harnesses for activities: maintenance, pools and listeners, with real servers."""
