"""Launched runs: which nodes work together, and what an agent does with its workers."""
