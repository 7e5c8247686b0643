"""Tensor parallelism: a model's own plan, slices of its weights, and ranks that agree before anyone compiles."""
