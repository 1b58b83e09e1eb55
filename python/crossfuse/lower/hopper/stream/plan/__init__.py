"""Decides everything that the kernel of a stream needs to know, before any of it is written."""
