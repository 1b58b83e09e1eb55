"""Rows that warps of the loading warpgroup make before a product loads them.

`recover` reads the nest that makes them off a function, `emit` writes it beside the loading roles:
a norm or a quantiser in front of a product is a phase of the product's kernel.
"""
