"""Strategies, replica context, variables (layer 6)."""
