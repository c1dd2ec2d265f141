"""Sequences on disk: the .kvsnap file, saving and restoring a sequence, and the prefix cache.

See docs/SNAPSHOT_FORMAT.md.
"""
