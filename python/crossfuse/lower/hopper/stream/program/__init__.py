"""What a stream of tiles computes, as plain values."""
