"""Who is where: topology, launcher checks, device choice (layer 2)."""
