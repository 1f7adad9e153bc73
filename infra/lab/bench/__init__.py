"""`berth bench`: how fast, how dense, beside a floor measured in the same run."""
