"""Optimizers, gradient buckets and checkpoints (layer 5)."""

from distrt.train.checkpoint import Checkpoint
from distrt.train.optimizers import SGD, Adam, Optimizer

__all__ = ["SGD", "Adam", "Checkpoint", "Optimizer"]
