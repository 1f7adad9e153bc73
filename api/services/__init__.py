"""The work behind the routes. Services know nothing of HTTP."""
