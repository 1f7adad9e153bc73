"""Contains the Python client of Berth's REST API. Begin with `berth_client.client`.

Not here: anything of the server:
this package is a distribution of its own and imports no other folder.
"""
