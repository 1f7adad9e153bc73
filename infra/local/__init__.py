"""The local stack: real servers and our own processes on 127.0.0.1."""
