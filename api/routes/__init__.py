"""One file a resource; each route checks who calls, and leaves the work to a service."""
