"""Benchmarks: what this package costs and saves, beside plain PyTorch and the public release."""
