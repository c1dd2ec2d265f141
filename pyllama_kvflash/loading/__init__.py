"""Turns a model and its options into contexts, pools and sequences, and counts their memory."""
