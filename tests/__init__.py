"""Contains all tests, a folder for each kind; CONTRIBUTING.md says which to run when.

Modules without `test_` in their name are shared by several folders.
"""
