"""Streams of tiles: cascades of reductions between two products, as in attention.

`recover/` reads a `StreamProgram` (`program`) off the scheduled function, `plan/` decides tiles,
stages and shared memory, `kernel` composes the parts: one warpgroup loads, the others multiply,
each 64 rows, with the state of their rows in registers; or, of wide sums, one scores and others
add, each to some columns of the same 64 rows (`consumer`). Where CTAs share keys, their states meet
by `merge`. What a stream stores may be the left operand of a product in the same kernel
(`feature`).
"""
