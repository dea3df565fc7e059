"""Fetches the newest states of a group, keeps them in memory, and serves them (rules B1 to B6).

One thread for each worker waits for copies; one for each lighthouse reports what is held.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torchft_svc.buddy.common_steps import CopiedSteps, StepRate
from torchft_svc.client.checkpointing import HTTPTransport
from torchft_svc.client.step.state import MANAGER_KEY, counters_of_copy
from torchft_svc.coordination import LighthouseClient, ManagerClient
from torchft_svc.core.quorum.lighthouse.copies import (
    REPORT_S,
    REPORT_TIMEOUT_S,
    HeldCopy,
    HistoryWatch,
    MembersAndCopies,
    StateKey,
    choose_buddy,
    states_to_keep,
    whole_states,
)
from torchft_svc.core.quorum.types import DEFAULT_JOB
from torchft_svc.errors import (
    CheckpointError,
    ConfigError,
    TorchFTError,
)
from torchft_svc.host.address import split_addresses
from torchft_svc.rpc.security import PLAIN, Security

log = logging.getLogger(__name__)

# A service that needs longer to answer is asked again.
_CALL_TIMEOUT = timedelta(seconds=REPORT_TIMEOUT_S)
# How long a worker may be silent before it offers a copy, and while it sends one.
_SILENCE_TIMEOUT = timedelta(seconds=60)
# An offer ends when nobody has fetched from it for this time, so it is made again before.
_OFFER_TIMEOUT = timedelta(hours=1)
_OFFER_AGAIN_S = 1800.0
_JOIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderConfig:
    """What a holder copies: for the group ``beside``, the states of the group after it.

    ``ranks``: the workers whose copies it holds, of ``group_world_size``; ``host``: where others
    reach this machine.
    """

    lighthouse: str
    job_id: str = DEFAULT_JOB
    beside: str = ""
    group_world_size: int = 1
    ranks: tuple[int, ...] = (0,)
    host: str | None = None
    security: Security = field(default=PLAIN)

    def __post_init__(self) -> None:
        if self.group_world_size < 1:
            raise ConfigError("group_world_size", self.group_world_size, "use 1 or more workers")
        if not self.ranks or not all(0 <= rank < self.group_world_size for rank in self.ranks):
            reason = f"use ranks from 0 to {self.group_world_size - 1}"
            raise ConfigError("group_rank", self.ranks, reason)


class ServedCopy:
    """A state in memory, and the server that others fetch it from."""

    def __init__(self, state: Any, rank: int, config: HolderConfig) -> None:
        """``state``: one with the counters that `counters_of_copy` has checked."""
        counters: dict[str, int] = state[MANAGER_KEY]
        self._state = state
        self._transport: HTTPTransport[Any] = HTTPTransport(
            hostname=config.host, security=config.security
        )
        self.described = HeldCopy(
            step=counters["step"],
            step_quorum_id=counters["quorum_id"],
            group_rank=rank,
            group_world_size=config.group_world_size,
            address=self._transport.metadata(),
        )
        self._offered_at = 0.0
        self.keep_offered()

    def keep_offered(self) -> None:
        """Offer the state for the first time, and again before that offer ends."""
        now = time.monotonic()
        if not self._offered_at or now - self._offered_at > _OFFER_AGAIN_S:
            self._offered_at = now
            self._transport.send_checkpoint([0], self.described.step, self._state, _OFFER_TIMEOUT)

    def close(self) -> None:
        """Stop serving, and free the memory."""
        self._state = None
        self._transport.shutdown()


class WorkerCopies:
    """The copies of one worker's states: the newest, and the newest that is whole (rule B4)."""

    def __init__(self, rank: int, config: HolderConfig) -> None:
        self._rank = rank
        self._config = config
        self._lock = threading.Lock()
        self._copies: list[ServedCopy] = []  # the newest last

    def describe_copies(self) -> list[HeldCopy]:
        """Return what is held, for a report."""
        with self._lock:
            for copy in self._copies:
                copy.keep_offered()
            return [copy.described for copy in self._copies]

    def newest_step(self) -> int:
        """Return the step of the newest copy (0: there is none)."""
        with self._lock:
            return self._copies[-1].described.step if self._copies else 0

    def add(self, state: Any) -> HeldCopy:
        """Serve ``state``, which has arrived; in a group of one worker it is whole at once."""
        copy = ServedCopy(state, self._rank, self._config)
        with self._lock:
            self._copies.append(copy)
        if self._config.group_world_size == 1:
            self.keep_only({copy.described.state_key})
        return copy.described

    def keep_only(self, states: set[StateKey]) -> None:
        """Free the copies of all other states."""
        with self._lock:
            dropped = [each for each in self._copies if each.described.state_key not in states]
            self._copies = [each for each in self._copies if each.described.state_key in states]
        for copy in dropped:
            copy.close()

    def free_outdated(self, whole: Collection[StateKey], *, is_next_coming: bool) -> None:
        """Free all but `states_to_keep`; ``whole``: all states that are whole."""
        with self._lock:
            held = [each.described.state_key for each in self._copies]
        newest = next((key for key in reversed(held) if key in whole), None)
        self.keep_only(states_to_keep(held, newest, is_next_coming=is_next_coming))


class CopyHolder:
    """Holds copies of a job's states from `start` until `close`."""

    def __init__(self, config: HolderConfig) -> None:
        self._config = config
        self._name = f"{config.beside}:{secrets.token_hex(8)}"
        self._addresses = split_addresses(config.lighthouse)
        self._copies = {rank: WorkerCopies(rank, config) for rank in config.ranks}
        self._receiver: HTTPTransport[Any] = HTTPTransport(
            hostname=config.host, security=config.security
        )
        self._viewing = threading.Lock()
        self._views: dict[str, MembersAndCopies] = {}  # of the lighthouses that answer, by address
        self._view = MembersAndCopies()
        self._history = HistoryWatch()
        self._rate = StepRate()
        self._is_over = threading.Event()
        self._reasons: dict[str, str] = {}  # logged last, by what it is about
        self._threads = [
            threading.Thread(target=run, args=(each,), name=f"torchft-buddy-{each}", daemon=True)
            for run, arguments in (
                (self._report_to, self._addresses),
                (self._follow_buddy, config.ranks),
            )
            for each in arguments
        ]

    def start(self) -> None:
        """Begin to fetch, and to report."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop, and free all copies; a lighthouse forgets them after a few seconds."""
        self._is_over.set()
        self._receiver.shutdown()
        for thread in self._threads:
            thread.join(_JOIN_S)
        for copies in self._copies.values():
            copies.keep_only(set())

    def __enter__(self) -> CopyHolder:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- reports ---------------------------------------------------------------------------------

    def _report_to(self, address: str) -> None:
        """Report to one lighthouse, which may be the one that leads, until the holder is closed."""
        while not self._is_over.is_set():
            with contextlib.suppress(TorchFTError), self._client(address) as client:
                while not self._is_over.is_set():
                    self._record_view(address, self._report(client))
                    self._log_once(address, "")
                    self._is_over.wait(REPORT_S)
            self._record_view(address, None)
            self._is_over.wait(REPORT_S)

    @contextlib.contextmanager
    def _client(self, address: str) -> Iterator[LighthouseClient]:
        try:
            job_id, security = self._config.job_id, self._config.security
            with LighthouseClient(
                address, _CALL_TIMEOUT, job_id=job_id, security=security
            ) as client:
                yield client
        except TorchFTError as error:
            self._log_once(address, f"lighthouse {address} does not receive reports: {error}")
            raise

    def _report(self, client: LighthouseClient) -> MembersAndCopies:
        copies = [each for held in self._copies.values() for each in held.describe_copies()]
        return client.report_copies(self._name, copies, _CALL_TIMEOUT)

    def _record_view(self, address: str, view: MembersAndCopies | None) -> None:
        """Follow the lighthouse that knows most, and free what has become outdated."""
        with self._viewing:
            if view is None:
                self._views.pop(address, None)
            else:
                self._views[address] = view
            if self._views:
                self._view = max(
                    self._views.values(), key=lambda each: (len(each.members), each.knows_copies)
                )
            if view is not None:
                self._rate.record_step(self._view.committed_step, time.monotonic())
                self._free_outdated(self._view)

    def _free_outdated(self, view: MembersAndCopies) -> None:
        """Free copies of another history of the job, and those older than a whole state."""
        newest = max(each.newest_step() for each in self._copies.values())
        if self._history.is_over(view, newest, time.monotonic()):
            if newest and not view.is_finished:
                log.warning("the job goes on from step %d: copies are freed", view.committed_step)
            for copies in self._copies.values():
                copies.keep_only(set())
            return
        for copies in self._copies.values():
            copies.free_outdated(self._whole_states(view), is_next_coming=False)

    def _whole_states(self, view: MembersAndCopies) -> Collection[StateKey]:
        return whole_states(view.copies, self._config.group_world_size)

    # -- copies ----------------------------------------------------------------------------------

    def _follow_buddy(self, rank: int) -> None:
        """Fetch each copy that the buddy offers, until the holder is closed."""
        copies = self._copies[rank]
        steps = CopiedSteps()
        while not self._is_over.is_set():
            view = self._view
            if not view.members:
                self._is_over.wait(REPORT_S / 4)
                continue
            buddy = choose_buddy(view.members, self._config.beside)
            try:
                copies.free_outdated(self._whole_states(view), is_next_coming=True)
                above = copies.newest_step()
                if self._config.group_world_size > 1:
                    step, rate = view.committed_step, self._rate.per_second()
                    above = steps.step_to_wait_above(above, step, rate)
                held, fetched_in_s = self._fetch(view.members[buddy], rank, above)
                steps.record_copy(held.step, above, fetched_in_s)
                self._log_once(f"rank {rank}", "")
                log.info("holds a copy of step %d, rank %d, of %s", held.step, rank, buddy)
                self._await_other_ranks(held, steps.patience_s())
            except TorchFTError as error:
                if self._is_over.is_set():
                    return
                self._log_once(f"rank {rank}", f"no copy of rank {rank} of {buddy}: {error}")
                self._is_over.wait(REPORT_S)
            except Exception:
                log.exception("no copy of rank %d of %s", rank, buddy)
                self._is_over.wait(REPORT_S)

    def _fetch(self, manager_address: str, rank: int, above: int) -> tuple[HeldCopy, float]:
        """Wait for the next copy that a worker offers, and serve it.

        Returns the copy, and how many seconds it took to fetch it once it was offered.

        Raises:
            TorchFTError: the group does not answer, or what it sends is no state above ``above``.
        """
        with ManagerClient(
            manager_address, _CALL_TIMEOUT, security=self._config.security
        ) as manager:
            metadata = manager._checkpoint_metadata(rank, _CALL_TIMEOUT)
        offered_at: list[float] = []
        state = self._receiver.recv_copy(
            metadata, above, _SILENCE_TIMEOUT, lambda: offered_at.append(time.monotonic())
        )
        step = counters_of_copy(state, manager_address)["step"]
        if step <= above:
            raise CheckpointError(manager_address, f"its copy of step {step} is not above {above}")
        return self._copies[rank].add(state), time.monotonic() - offered_at[0]

    def _await_other_ranks(self, held: HeldCopy, limit_s: float) -> None:
        """Wait, ``limit_s`` at most, until a lighthouse sees ``held`` as a part of a whole state.

        If the next copy were fetched before, it would replace this one.
        """
        until = time.monotonic() + limit_s
        while (
            held.group_world_size > 1
            and held.state_key not in self._whole_states(self._view)
            and time.monotonic() < until
            and not self._is_over.is_set()
        ):
            self._is_over.wait(REPORT_S / 4)

    def _log_once(self, party: str, reason: str) -> None:
        """Log ``reason`` (empty: all is well), unless it was the last one of ``party``."""
        if self._reasons.get(party, "") != reason:
            self._reasons[party] = reason
            if reason:
                log.info("%s", reason)
