"""Averages gradients in buckets during the backward pass."""
