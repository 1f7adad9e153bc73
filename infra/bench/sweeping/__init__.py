"""A fleet that is planted in PostgreSQL, Valkey and a node, with anomalies in it: for `berth bench sweep`."""
