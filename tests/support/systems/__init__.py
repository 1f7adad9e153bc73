"""Contains whole systems for tests: as processes, in Docker, under compose."""
