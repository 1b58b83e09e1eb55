def verify_kernel(kernel): pass
