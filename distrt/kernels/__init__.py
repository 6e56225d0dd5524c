"""The arithmetic: host library, CUDA module, NumPy reference (layer 2)."""
