"""Everything that can go wrong, on purpose, to real processes: workers, services, connections."""
