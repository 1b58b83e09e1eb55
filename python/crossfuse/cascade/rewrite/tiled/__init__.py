"""The tile form: a stream over tiles whose elements, or whose results, are products of matrices.

`tiled.tiled` writes it. What a step computes (`steps`) and which steps may be skipped (`skipping`)
is pure algebra; which rows and columns make a tile and what is multiplied (`tile_context`) is read
off the function before anything is written.
"""
