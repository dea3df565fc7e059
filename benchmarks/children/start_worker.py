"""A worker of a launcher that tells that it runs, and ends."""

from benchmarks.children.stages import tell_stage

tell_stage("worker")
