"""Contains fake activities under their real names, and stubs of workflows."""
