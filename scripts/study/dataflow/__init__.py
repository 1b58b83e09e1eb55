"""What any loop schedule of a chain moves, and a search through them; no plan uses it."""
