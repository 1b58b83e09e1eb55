"""Rows that warps of a product's kernel make before it loads them.

`recover` reads the nest that makes them off a function; `emit` writes it beside the loading roles,
or in front of the multiplying ones: a norm or a quantiser in front of a product is a phase of the
product's kernel.
"""
