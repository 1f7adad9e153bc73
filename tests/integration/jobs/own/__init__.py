"""An application's own job types, through real processes."""
