"""Tests the AWS templates. `make aws` runs them, because it installs CDK."""
