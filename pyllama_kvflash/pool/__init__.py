"""A sequence in a pool: the residency of its chunks, and their moves."""
