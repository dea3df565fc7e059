"""Lets the members of a process group meet over a store, and learn of failed members."""
