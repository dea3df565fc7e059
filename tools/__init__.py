"""Programs around the package that its wheel leaves out: sim, matrix, chaos, demo, benchmarks."""
