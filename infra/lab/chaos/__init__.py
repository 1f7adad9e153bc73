"""Breaking the whole system on purpose, and judging afterwards what became of every order."""
