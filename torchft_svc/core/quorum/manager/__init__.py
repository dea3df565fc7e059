"""The manager's decisions: the barriers of a group of workers, and its link to a lighthouse."""
