"""Chains of products in a model: groups, their plans, the calls that take their place."""
