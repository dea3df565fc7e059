"""A world of replica groups of one worker each: a lost worker costs the others one step at most.

The trainer runs the lighthouse. A worker that comes later, or falls behind, takes over the state of
the others at the beginning of a step, before its batch is drawn.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from torchft_svc.client import (
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroupGloo,
    ProcessGroupNCCL,
)
from torchft_svc.client.data.plan import Turn
from torchft_svc.coordination import LighthouseClient
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.errors import PeerError
from torchft_svc.trainer.held_state import HeldState
from torchft_svc.trainer.job import WorkerJob
from torchft_svc.trainer.messages import JoinWorld, Position
from torchft_svc.trainer.state import from_tree, to_tree

log = logging.getLogger(__name__)

# Until the next request, after one that was refused: the lighthouse may be starting.
_PAUSE_S = 0.1
# How long, and how often, the lighthouse is asked whether it knows a group that joins.
_KNOWN_S, _LOOK_S = 5.0, 0.01


class PerStepWorld:
    """See `TrainingWorld`."""

    def __init__(self, name: str, job: WorkerJob, device: torch.device, held: HeldState) -> None:
        self._name, self._job, self._device, self._held = name, job, device, held
        self._manager: Manager | None = None
        self._optimizer: VotingOptimizer | None = None
        self._given_up = threading.Event()
        self._turn = Turn(0, 1)

    def join(self, command: JoinWorld, position: Position) -> None:
        self._turn = Turn(command.rank, command.world_size)
        timeout = timedelta(seconds=self._job.timeout_s)
        # A world that is formed after all were lost does not continue the steps of the old one.
        job_id = f"{self._job.run_name}-{command.world}"
        on_gpu = self._device.type == "cuda"
        pg = ProcessGroupNCCL(timeout) if on_gpu else ProcessGroupGloo(timeout)
        self._manager = Manager(
            pg=pg,
            # The batch follows from the number of workers, so it is drawn after the quorum.
            use_async_quorum=False,
            timeout=timeout,
            # A request waits while others are in a collective.
            quorum_timeout=timedelta(seconds=max(self._job.join_timeout_s, self._job.timeout_s)),
            rank=0,
            world_size=1,
            lighthouse_addr=command.address,
            replica_id=self._name,
            job_id=job_id,
            in_process=True,
            handle_sigterm=False,
            spare=command.is_spare,
            buddy_every=0,  # the trainer holds a state itself (rule R5)
        )
        self._manager.register_state_dict_fn("trainer", self._take_over, self._hand_out)
        if position.step:
            counters = {"step": position.step, "batches_committed": position.step}
            self._manager.load_state_dict(counters)
        self._await_known(command.address, job_id)

    def _await_known(self, address: str, job_id: str) -> None:
        """Wait until the lighthouse knows this group.

        Others might ask before, and train without it; when they have finished, nobody is left to
        train with.
        """
        give_up_at = time.monotonic() + _KNOWN_S
        try:
            with LighthouseClient(address, timedelta(seconds=_KNOWN_S)) as lighthouse:
                while not self._is_known(lighthouse, job_id) and time.monotonic() < give_up_at:
                    self._given_up.wait(_LOOK_S)
        except PeerError as error:
            log.warning("the lighthouse does not say whom it knows: %s", error)

    def _is_known(self, lighthouse: LighthouseClient, job_id: str) -> bool:
        jobs = [job for job in lighthouse.status() if job.job == job_id]
        known = [group.replica_id for job in jobs for group in job.groups]
        known += [spare.replica_id for job in jobs for spare in job.prepared_spares]
        return self._given_up.is_set() or self._name in map(stable_name, known)

    def _hand_out(self) -> dict[str, Any]:
        return to_tree(self._held.live())

    def _take_over(self, tree: Any) -> None:
        self._held.heal(from_tree(tree, "another worker"))

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Any], schedulers: Sequence[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        assert self._manager is not None
        wrapped = [DistributedDataParallel(self._manager, model) for model in models]
        # One vote decides on all updates of a step.
        updated = optimizers[0] if len(optimizers) == 1 else optimizers
        voting = self._optimizer = VotingOptimizer(self._manager, updated)
        follow = [FollowingScheduler(each, lambda: voting.was_applied) for each in schedulers]
        return wrapped, [voting], follow

    @property
    def turn(self) -> Turn:
        return self._turn

    def begin_step(self) -> None:
        manager = self._manager
        assert manager is not None
        while not manager.has_fresh_step():
            self._held.check()
            try:
                manager.start_quorum()
            except PeerError as error:
                log.warning("no step yet: %s", error)
                self._given_up.wait(_PAUSE_S)
        self._held.check()
        rank = manager.participating_rank()
        self._turn = Turn(rank or 0, max(manager.num_participants(), 1))

    def has_lost_vote(self) -> bool:
        optimizer = self._optimizer
        if optimizer is None or optimizer.was_applied:
            return False
        optimizer.was_applied = True
        return True

    def abandon(self, reason: str) -> None:
        self._given_up.set()
        self.leave()

    def leave(self) -> None:
        if self._manager is not None:
            self._manager.shutdown(wait=False)


class VotingOptimizer(Optimizer):
    """Remembers whether the last update was applied."""

    was_applied = True

    def step(self, closure: Callable[[], float] | None = None) -> bool:  # type: ignore[override]
        self.was_applied = super().step(closure)
        return self.was_applied


class FollowingScheduler:
    """A scheduler that does not move when the step before was discarded."""

    def __init__(self, scheduler: Any, was_applied: Callable[[], bool]) -> None:
        self._scheduler, self._was_applied = scheduler, was_applied

    def step(self, *arguments: Any, **keywords: Any) -> None:
        if self._was_applied():
            self._scheduler.step(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_scheduler":
            raise AttributeError(name)
        return getattr(self._scheduler, name)
