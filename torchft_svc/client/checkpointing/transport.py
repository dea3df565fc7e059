"""The interface of checkpoint transports, which carry the state of groups that heal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torchft_svc.core.limits import one_line
from torchft_svc.errors import CheckpointError

T = TypeVar("T")

# A sentence; this package sends none that is longer.
MAX_REASON_BYTES = 1000


class StateViewer(Protocol):
    """Reads a worker's state while it trains; for any thread."""

    def step(self) -> int:
        """The step that the worker is in."""

    def collect(self, *, is_deferred: bool) -> Any:
        """The part of the state that `CheckpointTransport.send_deferred` gets, or the other one.

        Its tensors are live.
        """

    def reading(self) -> AbstractContextManager[None]:
        """Keep updates out while a block reads what was collected; it must be short.

        Raises:
            DeadlineExceeded: an update takes too long.
        """


class CheckpointTransport(ABC, Generic[T]):
    """Carries a state from an up-to-date worker to workers that heal.

    A worker serves at most one state at a time. On the serving side the manager calls, in each step
    in which a group heals, ``send_checkpoint``, and then ``disallow_checkpoint`` before the weights
    change.

    A transport with ``can_stripe`` gets calls of `send_striped` and `recv_striped` instead: all
    groups that are up to date hold the same state, and several of them may send it at once.

    If the forward pass continues while a group heals, it may change a part of the state. A
    transport with ``can_defer`` gets that part with `send_deferred` after the pass, and only the
    rest with `send_checkpoint`; for any other transport `send_checkpoint` is called after the pass.

    A transport with ``can_preview`` lets a group that starts fetch what does not change, before it
    asks for its first quorum: the others call `show_preview` once, and it calls `recv_preview`.

    A transport with ``can_copy`` lets a process that is no worker hold copies of the state: that
    calls `recv_copy`, and workers call `offer_copy` if `num_awaiting_copy` is not 0.
    """

    can_stripe: ClassVar[bool] = False
    can_defer: ClassVar[bool] = False
    can_preview: ClassVar[bool] = False
    can_copy: ClassVar[bool] = False

    @abstractmethod
    def metadata(self) -> str:
        """What a receiver needs to reach this worker; constant for the worker's lifetime."""

    def check_state(self, state: object) -> None:
        """Check that ``state``, or a part of a state, can be sent; the default accepts anything.

        Called when the manager starts, and for pieces that are registered later.

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
        """Stop serving the offered state in place: it may change after this call.

        Never waits for a receiver. May be called at any time, any number of times.
        """

    def retract_checkpoint(self) -> None:
        """Withdraw the offer: it is not this worker's state any more, although the step may match.

        Receivers that have not fetched it wait for the next offer. The default does nothing, for
        transports whose offers end with the quorum.
        """

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, why: str) -> None:
        """Report to ``dst_ranks`` that the state of ``step`` cannot be offered.

        Called after `send_checkpoint` has raised, or instead of it. By default this does nothing;
        then the receivers wait for their timeout.
        """

    def expect_checkpoint(self, like: T | None) -> None:
        """Announce that a state of about the size of ``like`` may arrive soon; None: it will not.

        A transport may prepare for `recv_checkpoint`; the default does nothing.
        """

    @abstractmethod
    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Fetch the state of ``step`` from the worker that advertised ``metadata``.

        ``src_rank`` is the replica rank of that worker's group, for messages.

        Raises:
            Unreachable: the worker does not answer.
            DeadlineExceeded: the source made no progress for ``timeout``.
            CheckpointError: the state is gone, or repeatedly damaged.
        """

    def progress(self) -> tuple[int, int]:
        """How many bytes of the state that is being received have arrived, and how many it has.

        Called on another thread; the second number is above 0 as soon as a source has described the
        state. The default is 0 of 0: not known. Then `lighthouse status` shows no progress of a
        heal, and `interrupt_receive` is called as soon as this group is out of the quorum, also if
        the source still sends. So a transport that can be interrupted should show its progress.
        """
        return 0, 0

    def send_striped(
        self,
        dst_ranks: list[int],
        extra_dst_ranks: list[int],
        step: int,
        state_dict: T,
        timeout: timedelta,
    ) -> None:
        """`send_checkpoint`; ``extra_dst_ranks`` may fetch a part of the state, or nothing."""
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

        Each of ``extras`` returns the metadata of one; it may take seconds, and raise.
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
        """Offer ``state_dict`` as the rest of the state of ``step``; only with ``can_defer``.

        It may change as soon as this returns. `refuse_checkpoint` may be called instead.

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
        """Fetch the state that the worker sends with `send_deferred`; see `recv_striped`."""
        reason = "it sends a state in two parts: use the same checkpoint transport in all groups"
        raise CheckpointError(f"replica rank {src_rank}", reason)

    def last_sent_at(self) -> float | None:
        """Return when groups that heal, and do not have all that was offered, last got some of it.

        On the clock of `time.monotonic`. A worker that ends waits for them (rule H12). None: they
        have everything, or that is not known, as by default.
        """
        return None

    def show_preview(self, viewer: StateViewer) -> None:
        """Let groups that start read the state through ``viewer``, from now on.

        By default this does nothing.
        """

    def recv_preview(self, metadata: str, timeout: timedelta, check: Callable[[], None]) -> None:
        """Fetch what the worker that advertised ``metadata`` shows, for a later `recv_checkpoint`.

        That fetches from its source, which may be another one, only what differs. ``check`` is
        called repeatedly; what it raises ends this.

        Raises:
            PeerError: the worker shows nothing, or is lost. What has arrived is kept.
        """
        raise NotImplementedError

    def num_awaiting_copy(self, step: int) -> int:
        """Return how many processes wait for a copy, and would fetch that of ``step``."""
        return 0

    def offer_copy(self, step: int, state_dict: T) -> None:
        """Offer the state of ``step`` to the processes that wait for a copy.

        As after `send_checkpoint`, the state must not change until `disallow_checkpoint` has
        returned; `retract_checkpoint` withdraws it.
        """
        raise NotImplementedError

    def recv_copy(
        self,
        metadata: str,
        above: int,
        timeout: timedelta,
        on_offer: Callable[[], object] = lambda: None,
    ) -> T:
        """Fetch the next copy of a step higher than ``above`` that a worker offers.

        ``on_offer`` is called when it does, before the bytes are fetched.

        Raises:
            PeerError: the worker offers none within ``timeout``, or is lost.
        """
        raise NotImplementedError

    def interrupt_receive(self, why: str) -> None:
        """Make the receive on another thread fail soon, with ``why``; by default it continues.

        Called if the state may never come: this group is out of the quorum, and `progress` shows
        no state yet, or a member is, and it shows no rest of a state yet (`recv_deferred`). Also
        called to end a `recv_preview`. Called again and again until the receive has ended.
        """

    def lose_source(self, why: str) -> None:
        """The assigned source of a receive on another thread is out of the quorum.

        It may still send. If it does not, other sources take its place, or the receive fails soon;
        by default it continues. Called repeatedly as long as the receive is under way.
        """

    @abstractmethod
    def shutdown(self, wait: bool = True) -> None:
        """Stop serving and receiving; ``wait`` joins the threads. Idempotent."""


def encode_reason(reason: str) -> bytes:
    """``reason``, why a source does not serve a state, as it is sent."""
    return reason.encode("ascii", "replace")[:MAX_REASON_BYTES]


def decode_reason(sent: bytes | bytearray) -> str:
    """The reason that a source has sent, fit for a line of a log."""
    return one_line(sent.decode("ascii", "replace").strip())


def why_not_offered(step: int, why: str) -> str:
    """The message for the groups that heal."""
    return f"step {step} cannot be offered: {why}"
