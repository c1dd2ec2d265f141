"""Benchmarks of answers: does the pool give the full cache's answers? `kvflash bench` is their command line."""
