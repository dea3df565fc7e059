"""The decisions of a trainer whose workers are lost: pure, as those of the core."""
