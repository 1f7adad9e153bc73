"""Contains proxies on a connection: they cut it, silence it, encrypt it, or kill who uses it."""
