"""Reads the programs of streams off a scheduled function; refuses what has another form."""
