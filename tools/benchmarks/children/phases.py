"""The parts of a training step that the benchmarks distinguish, and who may average it."""

WRAPPERS = ("ours", "torch", "none")
PHASES = ("zero_grad", "forward", "backward", "step")
# What ours does in which phase, beyond what plain DDP does; in the order of a step.
PARTS = {
    "begin": ("zero_grad", "begin the step, send the question"),
    "await_quorum": ("backward", "wait for the quorum"),
    "fill": ("backward", "copy and scale gradients into buckets"),
    "launch": ("backward", "launch the sums"),
    "await_sums": ("backward", "wait for the sums, after the last gradient"),
    "hand_out": ("backward", "hand the averages out"),
    "vote": ("step", "vote"),
    "ask": ("on the quorum thread", "quorum call, overlaps the forward pass"),
}
