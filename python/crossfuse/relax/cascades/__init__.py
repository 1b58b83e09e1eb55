"""Cascades of reductions in a model: calls that become one, how they grow, what they move."""
