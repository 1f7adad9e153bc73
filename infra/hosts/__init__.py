"""Worker hosts: how many are needed, and the platforms that run them."""
