"""All that runs in one user's container."""
