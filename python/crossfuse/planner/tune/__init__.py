"""Searches among the kernels of a chain: which to measure next, and what measurements teach."""
