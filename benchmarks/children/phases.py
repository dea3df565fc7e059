"""The parts of a training step that the benchmarks tell apart."""

PHASES = ("zero_grad", "forward", "backward", "step")
