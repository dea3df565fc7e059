"""An agent's workers as one group: their processes, channels, environments, and reports."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from torch.distributed.elastic.agent.server.api import WorkerSpec

from torchft_svc import env
from torchft_svc.core.launch.worker_events import WorkerState, WorldChangeEvent
from torchft_svc.core.launch.world import World
from torchft_svc.elastic.channel import ChannelRoot, FileChannel
from torchft_svc.elastic.messages import EndNotice, WorkerMessage, worker_message
from torchft_svc.elastic.runtime import AgentMessage, WorkerEvent, WorkerInfo
from torchft_svc.elastic.workers import LocalWorkers, WorkerEnd
from torchft_svc.errors import ChannelClosed, RequestRefused
from torchft_svc.host.process_end import POLL_S
from torchft_svc.host.worker_process import KILL_S

log = logging.getLogger(__name__)


@dataclass
class _WorkerReports:
    """The channel to a worker, and what it has reported since it was started."""

    channel: FileChannel
    is_cut_off: bool = False  # something has removed its channel
    has_started: bool = False
    reached: int = 0  # the round of the newest world that it has reached


@dataclass
class LocalGroup:
    """The workers of a node, which are started for a world, sent to others, and ended.

    ``prepare`` gets the environments before workers are started with them, by local rank;
    ``on_start`` the world and the process ids afterwards, ``on_world`` each world in which they are
    to work; ``on_pause`` is called when they are ended, or have to wait for another world.
    """

    node_id: str
    spec: WorkerSpec
    processes: LocalWorkers
    prepare: Callable[[dict[int, dict[str, str]]], None]
    on_start: Callable[[World, dict[int, int]], None]
    on_world: Callable[[World], None]
    on_pause: Callable[[], None]
    ends: dict[int, WorkerEnd] = field(default_factory=dict)  # of the last life of each worker
    # The instant at which workers that are being stopped get SIGKILL, or are given up.
    deadline: float | None = None
    _channels: ChannelRoot = field(default_factory=ChannelRoot)
    _reports: dict[int, _WorkerReports] = field(default_factory=dict)
    _num_starts: int = 0
    _is_killing: bool = False

    # -- state -------------------------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        return self.spec.local_world_size

    @property
    def is_stopping(self) -> bool:
        """Whether the workers are being stopped: from `begin_stop` until all have ended."""
        return self.deadline is not None

    @property
    def has_finished(self) -> bool:
        """Whether all workers have ended well."""
        return len(self._finished_ranks()) == self.num_workers

    @property
    def have_started(self) -> bool:
        """Whether each worker has called the worker API, or has ended well without it."""
        return len(self._reports) == self.num_workers and all(
            reports.has_started or rank in self._finished_ranks()
            for rank, reports in self._reports.items()
        )

    @property
    def reached_round(self) -> int:
        """The round of the newest world that all living workers have reached (0: of none)."""
        return min((self._reports[rank].reached for rank in self.processes.pids), default=0)

    @property
    def cut_off(self) -> list[int]:
        """The workers that run, but cannot receive another world any more."""
        return [rank for rank in self.processes.pids if self._reports[rank].is_cut_off]

    @property
    def descriptors(self) -> list[int]:
        """Readable when there is something to `receive` or `reap`."""
        channels = (
            reports.channel.fileno() for reports in self._reports.values() if not reports.is_cut_off
        )
        return [*self.processes.descriptors, *(each for each in channels if each is not None)]

    @property
    def poll_s(self) -> float | None:
        """The interval of looks in addition, where the descriptors do not show all that happens."""
        silent = any(reports.channel.fileno() is None for reports in self._reports.values())
        if silent or len(self.processes.pids) > len(self.processes.descriptors):
            return POLL_S
        return None

    def _finished_ranks(self) -> set[int]:
        return {rank for rank, end in self.ends.items() if end.failure is None}

    # -- starting and ending -----------------------------------------------------------------------

    def start(
        self,
        world: World,
        state: WorkerState,
        num_restarts: int,
        local_ranks: Collection[int] | None = None,
    ) -> None:
        """Start the workers with these local ranks (default: all) for ``world``, in ``state``.

        Raises:
            OSError: the system could not start one; others may run.
        """
        self._num_starts += 1
        chosen = range(self.num_workers) if local_ranks is None else local_ranks
        for rank in chosen:
            self.ends.pop(rank, None)
            self._open_channel(rank)
            self._send(rank, self._event(rank, state, world, None))
        environments = {
            rank: self._environment(rank, world, num_restarts) for rank in range(self.num_workers)
        }
        self.prepare(environments)
        self.processes.start(environments, chosen)
        pids = self.processes.pids
        self.on_start(world, {rank: pids[rank] for rank in chosen})
        if state is WorkerState.HEALTHY:
            self.on_world(world)

    def begin_stop(self, number: signal.Signals, grace_s: float, reason: str) -> None:
        """Announce the end to all workers, and signal them; `reap` and `deadline` do the rest."""
        self._is_killing = False
        self.deadline = time.monotonic() + grace_s
        for rank in self.processes.pids:
            self._send(rank, EndNotice(reason))
        self.processes.send_signal(number)
        self.on_pause()

    def stop_at_once(self) -> None:
        """Kill workers that are being stopped with the next `reap`."""
        if self.deadline is not None and not self._is_killing:
            self.deadline = time.monotonic()

    def reap(self) -> list[WorkerEnd]:
        """Return the ends of workers since the last call; they are in `ends`, too."""
        ended = self.processes.reap()
        for end in ended:
            self.ends[end.local_rank] = end
            log.log(
                logging.INFO if end.failure is None else logging.WARNING,
                "worker %d (process %d) has ended with exit code %d",
                end.local_rank,
                end.pid,
                end.exit_code,
            )
        if self.deadline is not None:
            self._continue_stop(self.deadline)
        return ended

    def close(self) -> None:
        """Kill what runs, and remove the channels. May be called twice."""
        self.processes.close()
        self._channels.close()
        for reports in self._reports.values():
            reports.channel.close()
        self._reports.clear()

    def _continue_stop(self, deadline: float) -> None:
        now = time.monotonic()
        if not self.processes.pids:
            self.deadline = None
        elif now >= deadline and not self._is_killing:
            self._is_killing = True
            self.deadline = now + KILL_S
            self.processes.send_signal(signal.SIGKILL)
        elif now >= deadline:
            self.processes.abandon()
            self.deadline = None

    # -- messages ----------------------------------------------------------------------------------

    def broadcast(self, state: WorkerState, world: World, change: WorldChangeEvent | None) -> None:
        """Send ``world`` to all workers that run; see `cut_off`."""
        for rank in self.processes.pids:
            self._send(rank, self._event(rank, state, world, change))
        if state is WorkerState.HEALTHY:
            self.on_world(world)
        else:
            self.on_pause()

    def receive(self) -> Iterator[tuple[int, WorkerMessage]]:
        """Receive the messages of workers, each with a local rank."""
        for rank, reports in list(self._reports.items()):
            while not reports.is_cut_off:
                try:
                    message = reports.channel.receive(0.0)
                    if message is None:
                        break
                    yield rank, worker_message(message)
                except RequestRefused as error:
                    log.warning("ignoring a message of worker %d: %s", rank, error)
                except ChannelClosed as error:
                    self._cut_off(rank, error)

    def note_started(self, rank: int) -> None:
        """Record that a worker has called the worker API."""
        self._reports[rank].has_started = True

    def note_reached(self, rank: int, round_: int) -> None:
        """Record that a worker has reached the world with the round ``round_``."""
        reports = self._reports[rank]
        reports.reached = max(reports.reached, round_)

    def _open_channel(self, rank: int) -> None:
        before = self._reports.pop(rank, None)
        if before is not None:
            before.channel.close()
        self._reports[rank] = _WorkerReports(self._channels.channel(rank, self._num_starts))

    def _event(
        self, rank: int, state: WorkerState, world: World, change: WorldChangeEvent | None
    ) -> WorkerEvent:
        return WorkerEvent(int(time.time()), self._info(rank, world), state, change)

    def _send(self, rank: int, message: AgentMessage) -> None:
        reports = self._reports[rank]
        if not reports.is_cut_off:
            try:
                reports.channel.send(message.to_message())
            except (ChannelClosed, OSError) as error:
                self._cut_off(rank, error)

    def _cut_off(self, rank: int, error: Exception) -> None:
        """Record that a worker cannot receive messages, which matters for the next world."""
        self._reports[rank].is_cut_off = True
        log.error("worker %d cannot receive other worlds any more: %s", rank, error)

    def _info(self, local_rank: int, world: World) -> WorkerInfo:
        ranks = world.ranks(self.node_id)
        return WorkerInfo(
            local_rank=local_rank,
            role_rank=ranks.first_role_rank + local_rank,
            rank=ranks.first_rank + local_rank,
            local_world_size=self.num_workers,
            role_world_size=ranks.role_world_size,
            world_size=ranks.world_size,
            master_addr=world.master_addr,
            master_port=world.master_port,
            round=world.round,
        )

    def _environment(self, local_rank: int, world: World, num_restarts: int) -> dict[str, str]:
        """The variables that torchrun sets for a worker, and the place of its channel."""
        ranks, info = world.ranks(self.node_id), self._info(local_rank, world)
        variables = {
            "RANK": info.rank,
            "GROUP_RANK": ranks.node_rank,
            "ROLE_RANK": info.role_rank,
            "ROLE_NAME": self.spec.role,
            "LOCAL_WORLD_SIZE": info.local_world_size,
            "WORLD_SIZE": info.world_size,
            "GROUP_WORLD_SIZE": ranks.num_nodes,
            "ROLE_WORLD_SIZE": info.role_world_size,
            "MASTER_ADDR": info.master_addr,
            "MASTER_PORT": info.master_port,
            "TORCHELASTIC_RESTART_COUNT": num_restarts,
            "TORCHELASTIC_MAX_RESTARTS": self.spec.max_restarts,
            "TORCHELASTIC_RUN_ID": self.spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": env.value_of("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            env.WORLD_ROUND_VARIABLE: world.round,
            "TORCHFT_WORKER_CHANNEL": self._reports[local_rank].channel.directory,
        }
        return {name: str(value) for name, value in variables.items()}
