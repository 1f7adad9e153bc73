"""`berth bench`: how fast, how dense, compared with a floor that is measured in the same run."""
