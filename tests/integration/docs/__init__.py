"""Tests configuration files of the documents and of compose on real servers."""
