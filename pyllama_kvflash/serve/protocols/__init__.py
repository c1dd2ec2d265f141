"""The server's protocols: the parsers of their requests, and the writers of their answers."""
