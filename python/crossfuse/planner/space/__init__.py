"""The candidates of a chain: how many, which rules leave which, and a search through the rest."""
