"""Mutants of a kernel's synchronisation: how they are made, run, and told from what is no fault."""
