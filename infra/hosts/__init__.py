"""How many hosts the workers need, and who is asked for them."""
