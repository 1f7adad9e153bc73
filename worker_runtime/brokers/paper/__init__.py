"""Connects a session to the paper exchange: the adapter, and the exchange's own messages.

Not here: the exchange itself (`infra/exchange`), which speaks these messages from the other side.
"""
