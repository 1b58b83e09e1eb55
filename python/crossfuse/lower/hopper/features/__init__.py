"""What kernels of products have only if their phases ask for it, a file each."""
