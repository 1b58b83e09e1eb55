"""Chains of products in a model: groups of operators, their plans, and calls of their kernels."""
