"""The Hopper pipeline: scheduled tile programs become warp-specialised kernels.

In the order of the data flow: `recover/` reads a `TileProgram` (`program/`) off the scheduled
function, `plan/` decides everything that the kernel needs to know, and `kernel` composes the parts:
loads by the `producer`, products by the `consumer` (`wgmma`), what becomes of their sums
(`dsm_reduce`, `epilogue/`), and who waits for whom (`pipeline`, `flags`). `generate` prints CUDA.
Kernels of other forms have folders of their own: rows made before a product (`rows/`), streams of
tiles (`stream/`), products that are reduced as they are made (`reduced/`).
"""

from crossfuse.lower.hopper.generate import generate
from crossfuse.lower.hopper.recover.function import is_tile_program, row_tensors, takes_fewer_rows

__all__ = ["generate", "is_tile_program", "row_tensors", "takes_fewer_rows"]
