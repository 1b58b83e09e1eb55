"""Rows of a product's tile, reduced in registers: maxima, sums and the best elements.

`recover` reads the program off a function whose stream has one tile, which a pipelined loop
multiplies; the kernel is that of a product, with `RowEpilogue` behind it.
"""
