"""User workers as real processes, on a real Valkey."""
