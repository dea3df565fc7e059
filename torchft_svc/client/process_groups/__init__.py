"""Process groups that survive the loss of their members."""
