"""Process groups that change what another process group does."""
