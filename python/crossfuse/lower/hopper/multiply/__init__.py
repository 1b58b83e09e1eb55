"""Tiles multiplied by wgmma, from shared memory or registers."""
