"""Who waits for whom: barriers in shared memory, rings of stages, flags in global memory."""
