"""What the cost model counts with: one measured record for each device, and how it is measured.

The CUDA programs are in ``cuda/``; `crossfuse.bench.calibrate` compiles and runs them.
"""
