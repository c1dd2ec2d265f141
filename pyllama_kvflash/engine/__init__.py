"""The engine: a model and its sequences, the steps of generation, lossless decoding and the meter."""
