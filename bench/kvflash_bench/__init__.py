"""Benchmarks: are a pool's answers the full cache's, and how fast is it? `kvflash bench` and `kvflash plot` are here."""
