"""The decisions of `torchft_svc.core` in a world with a virtual clock, seeded chance and faults."""
