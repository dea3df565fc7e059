"""Process groups that change the behavior of another process group."""
