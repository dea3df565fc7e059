"""The seam between the Manager and whatever carries a healing group's state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import ClassVar, Generic, TypeVar

from torchft_svc.core.types import one_line
from torchft_svc.errors import CheckpointError

T = TypeVar("T")

# A sentence; this package sends none that is longer.
MAX_REASON_BYTES = 1000


class CheckpointTransport(ABC, Generic[T]):
    """Carries a state from an up-to-date worker to workers that heal.

    A worker serves at most one state at a time. The order of calls on the serving side, in each
    step that somebody heals in: ``send_checkpoint``, then ``disallow_checkpoint`` before the
    weights are changed.

    A transport with ``can_stripe`` gets its calls as `send_striped` and `recv_striped` instead: all
    groups that are up to date hold the same state, and it may come from several of them at once.

    Where the forward pass goes on while somebody heals, a part of the state may change in it. A
    transport with ``can_defer`` is given that part with `send_deferred`, when the pass is over, and
    only the rest with `send_checkpoint`; any other gets its call of `send_checkpoint` that late.
    """

    can_stripe: ClassVar[bool] = False
    can_defer: ClassVar[bool] = False

    @abstractmethod
    def metadata(self) -> str:
        """What a receiver needs in order to reach this worker; it stays the same for life."""

    def check_state(self, state: object) -> None:
        """Look whether ``state``, or a part of one, can be sent; this one takes anything.

        Called when the manager starts, and for what is registered later.

        Raises:
            ConfigError: it holds a value that cannot be sent; the sentence names its path.
        """

    @abstractmethod
    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta
    ) -> None:
        """Offer ``state_dict`` as the state of ``step`` to the replica ranks ``dst_ranks``.

        May return before anything was sent. ``state_dict`` must not change until
        ``disallow_checkpoint`` has returned.

        Raises:
            ConfigError: the state holds a value that cannot be sent; the sentence names its path.
        """

    @abstractmethod
    def disallow_checkpoint(self) -> None:
        """From the return of this call on, the state offered last may be changed.

        It never waits for a receiver. May be called at any time, any number of times.
        """

    def retract_checkpoint(self) -> None:
        """What was offered is not this worker's state any more, although its step may be the same.

        Whoever has not fetched it has to wait for the next offer. A transport whose offers end with
        the quorum needs to do nothing, as this one does.
        """

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, why: str) -> None:
        """The state of ``step`` cannot be offered to ``dst_ranks``, who need not wait for it.

        Called after `send_checkpoint` has raised, or in its place. A transport may ignore it, as
        this one does; then those that heal wait for their timeout.
        """

    def expect_checkpoint(self, like: T | None) -> None:
        """A state of about the size of ``like`` may be fetched soon; None: it will not be.

        Time to get ready before `recv_checkpoint`; a transport may ignore it, as this one does.
        """

    @abstractmethod
    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Fetch the state of ``step`` from the worker that advertised ``metadata``.

        ``src_rank`` is the replica rank of that worker's group, for messages.

        Raises:
            Unreachable: nobody answers there.
            DeadlineExceeded: the source made no progress for ``timeout``.
            CheckpointError: the state is gone, or keeps arriving damaged.
        """

    def send_striped(
        self,
        dst_ranks: list[int],
        extra_dst_ranks: list[int],
        step: int,
        state_dict: T,
        timeout: timedelta,
    ) -> None:
        """`send_checkpoint`, and ``extra_dst_ranks`` may fetch a part from here, or nothing."""
        self.send_checkpoint(dst_ranks, step, state_dict, timeout)

    def recv_striped(
        self,
        src_rank: int,
        metadata: str,
        extras: Sequence[Callable[[], str]],
        step: int,
        timeout: timedelta,
    ) -> T:
        """`recv_checkpoint`, in part from other workers that may serve the same state.

        Each of ``extras`` finds out the metadata of one; it may take seconds, and raise.
        """
        return self.recv_checkpoint(src_rank, metadata, step, timeout)

    def send_deferred(
        self,
        dst_ranks: list[int],
        extra_dst_ranks: list[int],
        step: int,
        state_dict: T,
        timeout: timedelta,
    ) -> None:
        """Offer ``state_dict`` beside what was sent of ``step``; only with ``can_defer``.

        It may change as soon as this returns. `refuse_checkpoint` may be called in its place.

        Raises:
            ConfigError: the state holds a value that cannot be sent; the sentence names its path.
        """
        raise NotImplementedError

    def recv_deferred(
        self,
        src_rank: int,
        metadata: str,
        extras: Sequence[Callable[[], str]],
        step: int,
        timeout: timedelta,
    ) -> T:
        """Fetch what the worker sends with `send_deferred`; see `recv_striped`."""
        reason = "it sends a state in two parts: use the same checkpoint transport in all groups"
        raise CheckpointError(f"replica rank {src_rank}", reason)

    def interrupt_receive(self, why: str) -> None:
        """Let a `recv_deferred` on another thread fail soon; this one waits for its end."""

    def lose_source(self, why: str) -> None:
        """The group that a receive on another thread was assigned to is out of the quorum.

        It may still send. If it does not, others take its place, or the receive fails soon; this
        one waits for its end. Called again and again as long as the receive is under way.
        """

    @abstractmethod
    def shutdown(self, wait: bool = True) -> None:
        """Stop serving and receiving; ``wait`` joins the threads. May be called twice."""


def encode_reason(reason: str) -> bytes:
    """``reason``, why a source does not serve a state, as it is sent."""
    return reason.encode("ascii", "replace")[:MAX_REASON_BYTES]


def decode_reason(sent: bytes | bytearray) -> str:
    """The reason that a source has sent, fit for a line of a log."""
    return one_line(sent.decode("ascii", "replace").strip())


def why_not_offered(step: int, why: str) -> str:
    """The message for the groups that heal."""
    return f"step {step} cannot be offered: {why}"
