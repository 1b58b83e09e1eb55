"""Schedule primitives for thread-block clusters and distributed shared memory."""
