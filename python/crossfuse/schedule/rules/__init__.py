"""Hand-written rules that spell a whole schedule with the primitives."""
