"""Make scorers by name, and score with a small model."""
