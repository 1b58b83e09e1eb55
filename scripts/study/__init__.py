"""Studies of spaces, fits and searches: what programs of this folder need and no compile does."""
