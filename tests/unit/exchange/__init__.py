"""Tests the paper exchange without sockets."""
