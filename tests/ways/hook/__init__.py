"""Contains `sitecustomize`, which counts calls in each process of a traced system."""
