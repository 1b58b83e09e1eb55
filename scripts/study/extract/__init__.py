"""Chains read off functions that were written in any way; no plan uses it."""
