"""Sequences on disk: the .kvsnap file, what is taken from a sequence and put back, and the prefix cache.

See docs/SNAPSHOT_FORMAT.md.
"""
