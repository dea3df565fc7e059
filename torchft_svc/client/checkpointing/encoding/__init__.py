"""Encodes a state as JSON and bytes, and decodes it without pickle."""
