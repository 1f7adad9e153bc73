"""Tests schemas, rights, OpenAPI and the pure parts of the API."""
