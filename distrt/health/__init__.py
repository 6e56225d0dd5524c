"""Who is alive: exit hooks, fingerprints of calls (layer 3)."""
