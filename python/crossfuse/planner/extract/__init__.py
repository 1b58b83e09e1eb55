"""Chains read off functions; the only part of the planner that sees TVM."""
