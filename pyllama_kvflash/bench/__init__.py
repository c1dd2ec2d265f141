"""Benchmarks of answers: does the pool say what the full cache says? `kvflash bench` is their command line."""
