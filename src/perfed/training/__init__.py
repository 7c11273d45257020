"""A run: its settings, its folder, its training."""
