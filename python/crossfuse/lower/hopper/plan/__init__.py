"""Decides everything that a kernel needs to know, before any of it is written."""
