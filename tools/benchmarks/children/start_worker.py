"""A worker of a launcher that prints that it runs, and ends."""

from tools.benchmarks.children.stages import print_stage

print_stage("worker")
