"""Starts what a manager needs, and ends it in order."""
