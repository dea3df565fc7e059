"""Fetches the state of a group that is up to date."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

from torchft_svc import coordination
from torchft_svc.client.checkpointing.transport import CheckpointTransport
from torchft_svc.client.step.state import EARLY_KEY, join
from torchft_svc.coordination import QuorumResult, Security
from torchft_svc.errors import DeadlineExceeded, TorchFTError, Unreachable

# A source that needs longer to answer does not help.
_EXTRA_TIMEOUT = timedelta(seconds=5)
# Interval at which the sources are checked.
_CHECK_S = 0.1
# The first timeout of a request; each retry doubles it, because a busy machine may need longer.
# Before a retry the quorum is checked: a source that is dead or frozen leaves it long before the
# timeout of the heal.
_FIRST_TIMEOUT_S = 1.0


def fetch_state(
    transport: CheckpointTransport[Any],
    quorum: QuorumResult,
    group_rank: int,
    timeout_s: float,
    security: Security,
    check: Callable[[], None],
    check_source: Callable[[], None],
    check_own: Callable[[], None],
    on_progress: Callable[[int, int], None],
) -> Any:
    """The state of ``quorum.max_step``, from the source that the quorum assigned, and from others.

    If the forward pass of the source continues meanwhile, it sends a part of the state when its
    step ends.

    ``timeout_s`` is the longest time without progress. ``check`` raises if a member is out of the
    quorum: that ends the wait for a manager that does not answer, and for the end of the source's
    step; a source that ends sends what it has offered before (rule H12). ``check_source`` raises if
    the source itself is out of the quorum: if it sends nothing, other sources take its place, or
    the heal fails. ``check_own`` raises if this group itself is out: if no source has described the
    state yet, none offers that of this step any more, and the heal fails. ``on_progress`` is called
    repeatedly with the bytes that have arrived, and those of the state, or of the part that is on
    its way.

    Raises:
        PeerError: the source is gone, does not serve that step, or its data is damaged.
    """
    assert quorum.recover_src_replica_rank is not None
    timeout = timedelta(seconds=timeout_s)

    def look_up(address: str, timeout: timedelta) -> str:
        return look_up_source(address, group_rank, timeout.total_seconds(), security, check)

    check_source()  # it may have been lost while the members met: then nobody answers
    metadata = look_up(quorum.recover_src_manager_address, timeout)
    source = quorum.recover_src_replica_rank
    addresses = quorum.recover_extra_src_manager_addresses if transport.can_stripe else ()
    extra_timeout = min(timeout, _EXTRA_TIMEOUT)
    extras = [partial(look_up, address, extra_timeout) for address in addresses]

    def watch_source() -> None:
        received_bytes, state_bytes = transport.progress()
        if state_bytes:
            on_progress(received_bytes, state_bytes)
        check_source()

    with _receiving(transport, watch_source, check_own):
        if extras:
            state = transport.recv_striped(source, metadata, extras, quorum.max_step, timeout)
        else:
            state = transport.recv_checkpoint(source, metadata, quorum.max_step, timeout)
    if not (isinstance(state, dict) and EARLY_KEY in state):
        return state
    with _receiving(transport, watch_source, check):
        rest = transport.recv_deferred(source, metadata, extras, quorum.max_step, timeout)
    return join(state, rest, quorum.recover_src_manager_address)


@contextlib.contextmanager
def _receiving(
    transport: CheckpointTransport[Any],
    check_source: Callable[[], None],
    check_offered: Callable[[], None],
) -> Iterator[None]:
    """Report to ``transport``, which receives in this block, that the source is gone.

    ``check_offered`` counts until a source has described what it sends.
    """
    with (
        _watching(check_source, transport.lose_source),
        _watching(partial(_check_offered, transport, check_offered), transport.interrupt_receive),
    ):
        yield


def look_up_source(
    address: str,
    group_rank: int,
    timeout_s: float,
    security: Security,
    check: Callable[[], None],
    *,
    first_timeout_s: float = _FIRST_TIMEOUT_S,
) -> str:
    """Return where a worker of the group whose manager is at ``address`` serves its state.

    ``check`` is called after each request that was not answered, and raises if no other one is to
    follow.

    Raises:
        PeerError: the manager does not answer, or knows of no state.
    """
    deadline = time.monotonic() + timeout_s
    limit_s = first_timeout_s
    while True:
        left_s = max(0.001, deadline - time.monotonic())
        limit = timedelta(seconds=min(left_s, limit_s))
        try:
            with coordination.ManagerClient(address, limit, security=security) as source:
                return source._checkpoint_metadata(group_rank, limit)
        except (DeadlineExceeded, Unreachable):
            check()
            if left_s <= limit_s:
                raise
            limit_s *= 2


def _check_offered(transport: CheckpointTransport[Any], check: Callable[[], None]) -> None:
    """Raise what ``check`` raises, unless a source has begun to send the state, or its rest."""
    if not transport.progress()[1]:
        check()


@contextlib.contextmanager
def _watching(check: Callable[[], None], report: Callable[[str], None]) -> Iterator[None]:
    """Call ``check`` repeatedly on a thread in this block, and ``report`` with each error."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_CHECK_S):
            try:
                check()
            except TorchFTError as error:
                report(str(error))

    thread = threading.Thread(target=watch, name="torchft-heal-check", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
