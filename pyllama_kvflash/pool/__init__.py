"""A sequence in a pool: which of its chunks are on the device, and what moves them."""
