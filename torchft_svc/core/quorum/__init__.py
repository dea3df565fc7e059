"""Quorums: which groups train together, step by step; the values that its three stations share."""
