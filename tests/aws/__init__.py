"""AWS as code: what the templates say. Run by `make aws`, which installs CDK."""
