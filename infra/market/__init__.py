"""The exchanges: when they are open, and what is traded there."""
