"""What a schedule becomes, as one page for a browser: plan, cluster, time, and CUDA by line.

The page holds everything that it shows: it is one file, and asks no network for anything.
"""
