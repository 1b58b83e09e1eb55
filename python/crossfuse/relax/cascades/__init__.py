"""Cascades of reductions in a model: calls that become one kernel, and the bytes it moves."""
