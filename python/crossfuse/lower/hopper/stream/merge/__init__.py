"""Where CTAs share the keys of a tile of rows: their states are handed over and merged."""
