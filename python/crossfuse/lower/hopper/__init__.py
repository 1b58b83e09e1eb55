"""The Hopper pipeline: scheduled tile programs become warp-specialised kernels.

The data's way: `recover` reads a `TileProgram` off the scheduled function, `plan` decides
everything that the kernel needs to know, `kernel` composes the parts (ring, loads, wgmma,
epilogue), `generate` prints CUDA.
"""
