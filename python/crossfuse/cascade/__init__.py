"""Cascaded reductions: found, derived, proved, and rewritten into one streaming loop.

The way of the data: a function (`detect`) -> a `Site`, which holds a `Cascade` (`spec`) ->
a `Derivation` (`algebra`) -> a streaming function (`rewrite`).
"""
