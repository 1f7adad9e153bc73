"""Sends requests to a user's worker and waits for the answers, for the API and the orchestrator.

Not here: the queue itself (`infra/valkey/request_queue.py`), and which channel of the API an answer
arrives on (`api/workers/answers.py`).
"""
