"""The Python client of Berth's REST API. Begin with `berth_client.client`."""
