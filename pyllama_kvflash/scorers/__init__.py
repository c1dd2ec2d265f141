"""Creation of scorers by name, and the scorers that run a small model of their own."""
