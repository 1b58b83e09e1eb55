"""Reads a tile program off a scheduled function; refuses, in words, what has another form."""
