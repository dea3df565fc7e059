"""A worker of a launcher that tells that it runs, and ends."""

from tools.benchmarks.children.stages import tell_stage

tell_stage("worker")
