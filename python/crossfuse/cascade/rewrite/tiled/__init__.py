"""The tile form: a stream over tiles whose elements, or whose results, are products of matrices.

`tiled.tiled` writes it. What a step computes (`steps`), to which base (`base_two`) and which steps
may be skipped (`skipping`) is pure algebra; where rows, elements and columns of a tile lie
(`places`) and what is staged and multiplied (`operands`) is read off the function before anything
is written.
"""
