"""Tests activities on real servers, with a launcher in memory."""
