"""Collectives across the groups within one step."""
