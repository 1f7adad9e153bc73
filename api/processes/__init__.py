"""The processes of one API: their master, what they tell it, and what they have counted together."""
