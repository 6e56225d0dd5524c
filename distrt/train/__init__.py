"""Bucket plan, optimizers, checkpoints (layer 5)."""
