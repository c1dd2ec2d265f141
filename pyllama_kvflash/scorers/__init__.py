"""Scorers by name, and those that read along with a small model of their own."""
