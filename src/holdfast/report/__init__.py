"""Results -> figures and tables. Reads results only."""
