"""Figures: each drawer gets finished numbers and returns a matplotlib figure."""
