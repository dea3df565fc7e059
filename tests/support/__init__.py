"""What the tests share: services, trainings, programs, bounds, and slow twins of the core."""
