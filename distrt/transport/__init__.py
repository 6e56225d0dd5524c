"""The bytes: loopback threads for tests, MPI between processes (layer 2)."""
