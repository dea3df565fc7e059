"""The worker's decisions: the round of a step, its members, and which phase may follow."""
