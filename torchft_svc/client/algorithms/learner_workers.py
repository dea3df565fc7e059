"""Numbers that the workers of one learner exchange between the steps of its manager."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from torchft_svc.errors import ConfigError, WorkerLost

_NO_WORLD = (
    "the workers of a learner deliver at the same inner step, by torch.distributed: call "
    "init_process_group in all {size} of them, and in no others, before this"
)


class LearnerWorkers:
    """The workers of one learner: they exchange a few numbers on CPUs, over gloo.

    The thread that trains and the merger have a process group each, so that neither waits for the
    other's exchanges. All workers create this at the same time. An exchange waits for all workers:
    for at most ``timeout``, and not at all if this is the only one.

    Raises:
        ConfigError: there are several, and torch's world is not made of them.
    """

    def __init__(self, size: int, timeout: timedelta) -> None:
        self.are_several = size > 1
        self._timeout_s = timeout.total_seconds()
        self._groups: tuple[dist.ProcessGroup, ...] = ()
        if not self.are_several:
            return
        found = dist.get_world_size() if dist.is_initialized() else 0
        if found != size:
            where = f"a world of {found}" if found else "not initialized"
            raise ConfigError("torch.distributed", where, _NO_WORLD.format(size=size))
        self._groups = tuple(dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))

    def gather_in_training(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of all workers in the order of their ranks, as many from each.

        Raises:
            WorkerLost: one of them has ended, or has not come to this point in time.
        """
        return self._gather(0, numbers)

    def gather_in_merger(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of all workers as `gather_in_training`, on the merger's thread."""
        return self._gather(1, numbers)

    def _gather(self, which: int, numbers: Sequence[float]) -> list[list[float]]:
        if not self.are_several:
            return [list(numbers)]
        group = self._groups[which]
        mine = torch.tensor(numbers, dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(group.size())]
        work = dist.all_gather(found, mine, group=group, async_op=True)  # checks its arguments
        try:
            work.wait()
        except RuntimeError as error:  # gloo's words name an address, and nothing that was lost
            raise WorkerLost("exchanging what was delivered", self._timeout_s) from error
        return [each.tolist() for each in found]
