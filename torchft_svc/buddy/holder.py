"""Fetches the newest states of a group, keeps them in memory, and serves them (rules B1 to B6).

For each worker there is a thread that waits for copies, and for each lighthouse one that reports.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torchft_svc.client.checkpointing import HTTPTransport
from torchft_svc.client.step.state import MANAGER_KEY, counters_of_copy
from torchft_svc.coordination import LighthouseClient, ManagerClient
from torchft_svc.core.quorum.lighthouse.copies import (
    REPORT_S,
    REPORT_TIMEOUT_S,
    HeldCopy,
    MembersAndCopies,
)
from torchft_svc.core.quorum.lighthouse.holder_plan import (
    LOOK_S,
    SILENCE_S,
    HolderPlan,
    NextCopy,
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
_SILENCE_TIMEOUT = timedelta(seconds=SILENCE_S)
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


class CopyHolder:
    """Holds copies of a job's states until `close`; its threads begin with ``start``."""

    def __init__(self, config: HolderConfig) -> None:
        self._config = config
        self._name = f"{config.beside}:{secrets.token_hex(8)}"
        self._addresses = split_addresses(config.lighthouse)
        self._lock = threading.Lock()
        self._plan = HolderPlan(config.beside, config.ranks, config.group_world_size)
        self._copies: dict[int, list[ServedCopy]] = {rank: [] for rank in config.ranks}
        self._receiver: HTTPTransport[Any] = HTTPTransport(
            hostname=config.host, security=config.security
        )
        self._is_over = threading.Event()
        self._reasons: dict[str, str] = {}  # the last one that was logged of each party
        self._threads = [
            threading.Thread(target=work, args=(what,), name=f"torchft-buddy-{what}", daemon=True)
            for work, whats in (
                (self._report_to, self._addresses),
                (self._follow_buddy, config.ranks),
            )
            for what in whats
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
        with self._lock:
            held = [copy for copies in self._copies.values() for copy in copies]
            self._copies = {rank: [] for rank in self._copies}
        for copy in held:
            copy.close()

    def __enter__(self) -> CopyHolder:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _deciding(self) -> Iterator[HolderPlan]:
        """Lend the decisions to one thread; afterwards free what they do not keep."""
        freed: list[ServedCopy] = []
        with self._lock:
            yield self._plan
            for rank, copies in self._copies.items():
                kept = self._plan.kept(rank)
                freed += [each for each in copies if each.described.state_key not in kept]
                self._copies[rank] = [each for each in copies if each.described.state_key in kept]
        for copy in freed:
            copy.close()

    # -- reports ---------------------------------------------------------------------------------

    def _report_to(self, address: str) -> None:
        """Report to one lighthouse again and again: any of them may be the one that leads.

        One that does not answer holds up no report to another.
        """
        while not self._is_over.is_set():
            with contextlib.suppress(TorchFTError), self._client(address) as client:
                while not self._is_over.is_set():
                    self._record_view(address, self._report(client))
                    self._log_once(address, "")
                    self._is_over.wait(REPORT_S)
            with self._deciding() as plan:
                plan.record_silence(address)
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
        return client.report_copies(self._name, self.described(), _CALL_TIMEOUT)

    def described(self) -> list[HeldCopy]:
        """Return what is held, to be reported; it is offered for as long as it is."""
        with self._lock:
            held = [copy for copies in self._copies.values() for copy in copies]
            for copy in held:
                copy.keep_offered()
        return [copy.described for copy in held]

    def _record_view(self, address: str, view: MembersAndCopies) -> None:
        with self._deciding() as plan:
            goes_on_from = plan.record_view(address, view, time.monotonic())
        if goes_on_from is not None:
            log.warning("the job goes on from step %d: copies are freed", goes_on_from)

    # -- copies ----------------------------------------------------------------------------------

    def _follow_buddy(self, rank: int) -> None:
        """Fetch each copy that the buddy offers, until the holder is closed."""
        while not self._is_over.is_set():
            with self._deciding() as plan:
                wanted = plan.begin_copy(rank)
            if wanted is None:
                self._is_over.wait(LOOK_S)
                continue
            try:
                step = self._fetch(wanted, rank)
                self._log_once(f"rank {rank}", "")
                log.info("holds a copy of step %d, rank %d, of %s", step, rank, wanted.buddy)
                self._await_other_workers(rank)
            except TorchFTError as error:
                if self._is_over.is_set():
                    return
                self._log_once(f"rank {rank}", f"no copy of rank {rank} of {wanted.buddy}: {error}")
                self._is_over.wait(REPORT_S)
            except Exception:
                log.exception("no copy of rank %d of %s", rank, wanted.buddy)
                self._is_over.wait(REPORT_S)

    def _fetch(self, wanted: NextCopy, rank: int) -> int:
        """Wait for the next copy that a worker offers, and serve it; returns its step.

        Raises:
            TorchFTError: the group does not answer, or what it sends is no state of such a step.
        """
        address, above = wanted.manager_address, wanted.above
        with ManagerClient(address, _CALL_TIMEOUT, security=self._config.security) as manager:
            metadata = manager._checkpoint_metadata(rank, _CALL_TIMEOUT)
        offered_at: list[float] = []
        state = self._receiver.recv_copy(
            metadata, above, _SILENCE_TIMEOUT, lambda: offered_at.append(time.monotonic())
        )
        step = counters_of_copy(state, address)["step"]
        if step <= above:
            raise CheckpointError(address, f"its copy of step {step} is not above {above}")
        self.add(rank, state, above, time.monotonic() - offered_at[0])
        return step

    def add(self, rank: int, state: Any, above: int, fetched_in_s: float) -> HeldCopy:
        """Serve ``state``, the first one above step ``above``, instead of what it replaces."""
        copy = ServedCopy(state, rank, self._config)
        with self._deciding() as plan:
            self._copies[rank].append(copy)
            key, now = copy.described.state_key, time.monotonic()
            plan.record_copy(rank, key, above, fetched_in_s, now)
        return copy.described

    def _await_other_workers(self, rank: int) -> None:
        """Keep the newest copy for those of the other workers."""
        while not self._is_over.is_set():
            with self._lock:
                is_needed = self._plan.awaits_other_workers(rank, time.monotonic())
            if not is_needed:
                return
            self._is_over.wait(LOOK_S)

    def _log_once(self, party: str, reason: str) -> None:
        """Log ``reason`` (empty: all is well), unless it was the last one of ``party``."""
        if self._reasons.get(party, "") != reason:
            self._reasons[party] = reason
            if reason:
                log.info("%s", reason)
