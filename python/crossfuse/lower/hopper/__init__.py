"""The Hopper pipeline: scheduled tile programs become warp-specialised kernels.

The data's way: `recover` reads a `TileProgram` off the scheduled function, `plan` decides
everything that the kernel needs to know, `kernel` composes the parts (ring, loads, wgmma,
epilogue), `generate` prints CUDA.
"""

from crossfuse.lower.hopper.generate import generate
from crossfuse.lower.hopper.recover import is_tile_program, row_tensors
from crossfuse.lower.hopper.recover_rows import takes_fewer_rows

__all__ = ["generate", "is_tile_program", "row_tensors", "takes_fewer_rows"]
