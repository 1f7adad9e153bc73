"""Contains the job queue's harness on Valkey, runner processes, and a model of the queue."""
