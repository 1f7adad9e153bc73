"""Contains all tests, a folder for each kind; CONTRIBUTING.md says which to run when.

`tests/support/` has what several of them share. `drills.py` and `groups.py` choose and sort tests.
"""
