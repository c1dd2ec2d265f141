"""The protocols of the server: how each one's requests are read, and its answers written."""
