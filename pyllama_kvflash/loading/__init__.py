"""From a model and its options to contexts, pools and sequences, and their memory."""
