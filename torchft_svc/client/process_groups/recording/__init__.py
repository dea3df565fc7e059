"""Records the launched collectives of a quorum for later analysis."""
