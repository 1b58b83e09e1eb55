"""Measured record of each device, which the cost model reads, and how it is measured.

The CUDA programs are in ``cuda/``; `crossfuse.bench.calibrate` compiles and runs them.
"""
