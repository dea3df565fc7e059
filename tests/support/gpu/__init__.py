"""Ranks and trainers on one GPU."""
