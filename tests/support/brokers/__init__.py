"""Contains fake brokers, a harness for each adapter, and clients of the paper exchange."""
