"""A model and its sequences: loading, generation, speculation."""
