"""A model and its options as contexts, pools and sequences, and what they take."""
