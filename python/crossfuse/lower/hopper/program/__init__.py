"""What a scheduled function does tile by tile, as plain values."""
