"""Holds copies of a job's newest states in a process of its own (docs/design/buddy-copies.md)."""
