"""Commands to Valkey as they cross the wire, for clients that behave as no library does."""

from __future__ import annotations


def encoded(*words: str) -> bytes:
    """Returns a command as it crosses the wire."""
    parts = [f"*{len(words)}", *(line for word in words for line in (f"${len(word)}", word))]
    return "".join(f"{part}\r\n" for part in parts).encode()
