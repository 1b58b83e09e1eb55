"""What becomes of a tile's sums: the epilogue, stores, and sums of several clusters."""
