"""What a schedule becomes, as one page for a browser: plan, cluster, time, and CUDA by line.

The page is one self-contained file, which needs no network.
"""
