"""Programs that the benchmarks start as processes; those named `*_public` run with the peer's
Python and import nothing of ours but `workload` and `phases`."""
