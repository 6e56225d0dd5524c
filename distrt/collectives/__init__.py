"""Collective algorithms, one file each; ``schedule.py`` is pure integers (layer 3)."""
