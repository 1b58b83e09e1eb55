"""What CTAs of a cluster send one another through distributed shared memory."""
