"""Serves the REST API and the operators' pages, in a folder for each feature.

Not here: tables (`infra/database`), Valkey scripts (`worker_runtime/protocol/lua`), and calls of
brokers, which only workers make.
"""
