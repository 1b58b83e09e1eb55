"""Cascades of reductions: which stream computes one, and why that one."""
