"""What goes in and out of the API, with strict limits and examples."""
