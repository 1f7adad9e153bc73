"""Berth on AWS as code: CDK in Python, two stages (`make aws`; packages in `requirements.lock` here)."""
