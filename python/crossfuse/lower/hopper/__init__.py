"""The Hopper pipeline: scheduled tile programs become warp-specialised kernels.

In the order of the data flow: `recover/` reads a `TileProgram` (`program/`) off the scheduled
function, `plan/` decides everything that the kernel needs to know, and `generate` composes the
parts: loads and products (`roles`, `wgmma`), what becomes of their sums (`epilogue/`, `features/`),
and who waits for whom (`pipeline`, `flags`). It prints CUDA, too.
Kernels of other forms have folders of their own: rows made before a product (`rows/`), streams of
tiles (`stream/`), products that are reduced as they are made (`reduced.py`).
"""
