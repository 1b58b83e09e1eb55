"""Estimated microseconds of kernels, in named terms."""
