"""Collectives in a process of their own, which can be killed at any moment."""
