"""A small model that has what a program's features ask for, and knows what of it must agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tools.matrix.program import Feature, Program

WIDTH = 16
INPUTS = 8
# More than a transport may copy beforehand: a state that changes on its way would arrive torn.
_QUEUE = 8192


class Memory(nn.Module):
    """State that each forward pass changes: a queue, a codebook, and a plain number of passes.

    All entries of the queue are that number, so a state that is not of one moment is noticed.
    """

    queue: Tensor
    codebook: Tensor
    tail: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.register_buffer("queue", torch.zeros(_QUEUE))
        self.register_buffer("codebook", torch.zeros(WIDTH))
        self.register_buffer("tail", torch.zeros(_QUEUE))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            with torch.no_grad():
                self.queue.fill_(self.passes)
                self.codebook.lerp_(hidden.float().mean(0), 0.1)
                self.tail.fill_(self.passes)
        return hidden + self.codebook.to(hidden.dtype)

    def get_extra_state(self) -> dict[str, int]:
        return {"passes": self.passes}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]

    def check(self) -> str | None:
        """What is wrong with a state that was put in place."""
        seen = {self.passes, *self.queue.tolist(), *self.tail.tolist()}
        return f"a state of several moments: passes {sorted(seen)}" if len(seen) > 1 else None


class Block(nn.Module):
    """Two layers, of which the forward pass may keep nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        down: Tensor = self.down(functional.gelu(self.up(hidden)))
        return down


class Net(nn.Module):
    """``batch x INPUTS`` to ``batch x 1``; weights are drawn by torch's global generator."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        has = program.has
        self._checkpoints = has(Feature.CHECKPOINTING) and not program.is_sharded
        self.first = nn.Linear(INPUTS, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if has(Feature.BATCH_NORM) else nn.LayerNorm(WIDTH)
        self.block: nn.Module = Block()
        self.memory = Memory() if has(Feature.FORWARD_STATE) else None
        self.mirror = self.frozen = self.wide = self.narrow = self.table = None
        if has(Feature.TIED):
            self.mirror = nn.Linear(WIDTH, WIDTH)
            self.mirror.weight = self.block.up.weight
        if has(Feature.FROZEN):
            self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        if has(Feature.MIXED_TYPES):
            self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
            self.narrow = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        if has(Feature.SPARSE):
            self.table = nn.Embedding(10, WIDTH, sparse=True)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.first(inputs)))
        if self.table is not None:
            hidden = hidden + self.table(inputs[:, 0].abs().long().clamp(max=9))
        if self.memory is not None:
            hidden = self.memory(hidden)
        if self._checkpoints:
            hidden = hidden + checkpoint(self.block, hidden, use_reentrant=False)
        else:
            hidden = hidden + self.block(hidden)
        if self.mirror is not None:
            hidden = hidden + torch.tanh(self.mirror(hidden))
        if self.frozen is not None:
            hidden = hidden + torch.tanh(self.frozen(hidden))
        if self.wide is not None and self.narrow is not None:
            hidden = hidden + self.wide(hidden.double()).float() / 2
            hidden = hidden + self.narrow(hidden.bfloat16()).float() / 2
        outputs: Tensor = self.last(torch.tanh(hidden))
        return outputs

    def fragments(self) -> list[nn.Module]:
        """Two parts that have all parameters, for what is synchronized one after the other."""
        first = [self.first, self.norm]
        rest = [part for part in self.children() if part not in first]
        return [nn.ModuleList(first), nn.ModuleList(rest)]

    def shardable(self, program: Program) -> list[nn.Module]:
        """The parts that FSDP may shard by themselves, besides the whole."""
        if program.has(Feature.TIED):
            return []
        apart = [self.wide, self.narrow] if program.has(Feature.MIXED_TYPES) else []
        return [self.block, *(part for part in apart if part is not None)]


def shared_part(state: dict[str, Any], program: Program) -> dict[str, Any]:
    """What of a model's state must be equal in all groups: all but what forward passes change."""
    own = ["memory."] if program.has(Feature.FORWARD_STATE) else []
    if program.has(Feature.BATCH_NORM):
        own += ["norm.running_", "norm.num_batches_tracked"]
    return {name: value for name, value in state.items() if not name.startswith(tuple(own))}
