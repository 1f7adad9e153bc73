"""The paper exchange: a small broker with a durable ledger, and the judge in tests."""
