"""Whole models in the bench: layers with random weights, ours beside torch."""
