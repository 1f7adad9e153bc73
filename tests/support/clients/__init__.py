"""Contains what stands between a client and the API in tests: scripted APIs, cut connections."""
