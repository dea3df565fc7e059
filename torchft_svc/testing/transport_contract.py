"""The contract of checkpoint transports, as tests to inherit; and the simplest transport.

In a test module::

    class TestMyTransport(TransportContract):
        @contextlib.contextmanager
        def pair(self):
            with MyTransport() as source, MyTransport() as receiver:
                yield source, receiver

pytest then checks every rule on that transport. Without pytest, call the methods: a broken rule
raises an `AssertionError`.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any, ClassVar

import torch

from torchft_svc.client.checkpointing.transport import CheckpointTransport
from torchft_svc.errors import CheckpointError, DeadlineExceeded, PeerError, Unreachable

Transport = CheckpointTransport[Any]
Pair = tuple[Transport, Transport]


class TransportContract:
    """Each ``test_`` method is one rule of `CheckpointTransport`; override `pair`.

    ``timeout`` is for calls that succeed, ``short`` for calls that have to fail at their timeout; a
    slow transport may need longer ones.
    """

    timeout: ClassVar[timedelta] = timedelta(seconds=20)
    short: ClassVar[timedelta] = timedelta(seconds=0.5)

    def pair(self) -> contextlib.AbstractContextManager[Pair]:
        """Two new transports: of the source, replica rank 0, and of a receiver, replica rank 1."""
        raise NotImplementedError

    # -- what arrives ------------------------------------------------------------------------------

    def test_a_state_arrives_bit_by_bit(self) -> None:
        with self._opened() as run:
            assert bits(run.heal(1, example_state(1))) == bits(example_state(1))

    def test_a_receiver_may_come_before_the_state_is_offered(self) -> None:
        with self._opened() as run:
            received = run.receive(1)
            time.sleep(self.short.total_seconds() / 5)
            run.send(1, example_state(1))
            assert bits(run.result(received)) == bits(example_state(1))

    def test_each_step_has_its_own_state(self) -> None:
        with self._opened() as run:
            metadata = run.source.metadata()
            for step in (3, 4, 9):
                assert bits(run.heal(step, example_state(step))) == bits(example_state(step))
                run.source.disallow_checkpoint()
            assert run.source.metadata() == metadata, "it stays the same for life"

    def test_what_arrives_is_the_receivers_own(self) -> None:
        with self._opened() as run:
            state = example_state(1)
            received = run.heal(1, state)
            change(received)
            assert bits(state) == bits(example_state(1))

    def test_the_state_may_change_once_it_is_disallowed(self) -> None:
        """A late receiver gets the state as it was offered, or an error."""
        with self._opened() as run:
            state = example_state(1)
            sent = run.send(1, state)
            wait([sent], self.short.total_seconds())
            received = None if sent.done() else run.receive(1)  # it may wait for its receivers
            run.result(sent)
            run.source.disallow_checkpoint()
            change(state)
            with contextlib.suppress(PeerError):
                arrived = run.result(received or run.receive(1))
                assert bits(arrived) == bits(example_state(1)), "it is of another moment"

    # -- what fails --------------------------------------------------------------------------------

    def test_a_state_that_nobody_offers_is_an_error_in_time(self) -> None:
        with self._opened() as run:
            run.fails(run.receive(1, self.short))

    def test_another_step_is_an_error(self) -> None:
        with self._opened() as run:
            run.send(1, example_state(1))
            run.fails(run.receive(2, self.short))

    def test_a_refused_state_is_an_error_in_time(self) -> None:
        with self._opened() as run:
            received = run.receive(1, self.short)
            run.source.refuse_checkpoint([1], 1, "it cannot be sent")
            run.fails(received)

    def test_a_source_that_is_gone_is_an_error_in_time(self) -> None:
        with self._opened() as run:
            run.source.shutdown()
            run.fails(run.receive(1, self.short))

    def test_a_receive_that_is_given_up_ends_in_time(self) -> None:
        with self._opened() as run:
            received = run.receive(1, self.short)
            while not received.done():
                run.receiver.lose_source("it is out of the quorum")
                run.receiver.interrupt_receive("the step is over")
                time.sleep(self.short.total_seconds() / 20)
            run.fails(received)

    # -- calls at any time -------------------------------------------------------------------------

    def test_calls_that_may_come_at_any_time(self) -> None:
        with self._opened() as run:
            for transport in (run.source, run.receiver):
                transport.disallow_checkpoint()
                transport.retract_checkpoint()
                transport.expect_checkpoint(example_state(1))
                transport.expect_checkpoint(None)
                transport.check_state(example_state(1))
                transport.disallow_checkpoint()
            assert bits(run.heal(1, example_state(1))) == bits(example_state(1))

    def test_disallowing_waits_for_no_receiver(self) -> None:
        with self._opened() as run:
            sent = run.send(1, example_state(1))
            wait([sent], self.short.total_seconds())
            began_at = time.monotonic()
            run.source.disallow_checkpoint()
            assert time.monotonic() - began_at < self.timeout.total_seconds() / 2

    def test_it_may_be_shut_down_twice(self) -> None:
        with self._opened() as run:
            run.heal(1, example_state(1))
            for transport in (run.source, run.receiver):
                transport.shutdown()
                transport.shutdown()

    # -- what only some can do ---------------------------------------------------------------------

    def test_what_comes_later_arrives_beside_the_rest(self) -> None:
        """Rules for a transport with ``can_defer``."""
        with self._opened() as run:
            if not run.source.can_defer:
                return
            assert bits(run.heal(1, example_state(1))) == bits(example_state(1))
            later = example_state(2)
            received = run.pool.submit(
                run.receiver.recv_deferred, 0, run.source.metadata(), [], 1, self.timeout
            )
            run.source.send_deferred([1], [], 1, later, self.timeout)
            change(later)  # as soon as the call has returned
            assert bits(run.result(received)) == bits(example_state(2))

    def test_an_extra_source_that_cannot_be_found_is_done_without(self) -> None:
        """Rules for a transport with ``can_stripe``."""

        def lookup() -> str:
            raise Unreachable("manager", "nowhere:1", "it is gone")

        with self._opened() as run:
            if not run.source.can_stripe:
                return
            run.source.send_striped([1], [], 1, example_state(1), self.timeout)
            arrived = run.receiver.recv_striped(0, run.source.metadata(), [lookup], 1, self.timeout)
            assert bits(arrived) == bits(example_state(1))

    @contextlib.contextmanager
    def _opened(self) -> Iterator[_Run]:
        with self.pair() as (source, receiver), ThreadPoolExecutor(4) as pool:
            try:
                yield _Run(source, receiver, pool, self.timeout)
            finally:
                for transport in (source, receiver):
                    transport.shutdown()  # ends what a broken one would wait for


class _Run:
    """A source and a receiver; calls that may block run on threads."""

    def __init__(
        self, source: Transport, receiver: Transport, pool: ThreadPoolExecutor, timeout: timedelta
    ) -> None:
        self.source, self.receiver, self.pool = source, receiver, pool
        self._timeout = timeout

    def send(self, step: int, state: Any) -> Future[None]:
        return self.pool.submit(self.source.send_checkpoint, [1], step, state, self._timeout)

    def receive(self, step: int, timeout: timedelta | None = None) -> Future[Any]:
        self.receiver.expect_checkpoint(None)
        metadata, limit = self.source.metadata(), timeout or self._timeout
        return self.pool.submit(self.receiver.recv_checkpoint, 0, metadata, step, limit)

    def heal(self, step: int, state: Any) -> Any:
        """Send and receive; returns what has arrived."""
        received, sent = self.receive(step), self.send(step, state)
        arrived = self.result(received)
        self.result(sent)
        return arrived

    def result(self, future: Future[Any]) -> Any:
        wait([future], 2 * self._timeout.total_seconds())
        assert future.done(), "it does not come to an end"
        return future.result()

    def fails(self, received: Future[Any]) -> None:
        """Check that it fails with a `PeerError`: then the manager heals the group again."""
        try:
            arrived = self.result(received)
        except PeerError:
            return
        raise AssertionError(f"something has arrived: {arrived}")


def example_state(seed: int) -> dict[str, Any]:
    """A typical state of a trainer; equal seeds give new tensors with equal bits."""
    dice = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "weight": torch.randn(300, 70, generator=dice),
            "half": torch.randn(5, 4, generator=dice).to(torch.bfloat16),
            "mask": torch.randint(0, 2, (9,), generator=dice).to(torch.bool),
            "empty": torch.empty(0, 3),
            "count": torch.tensor(seed),
        },
        "optimizer": {"lr": 0.1 * seed, "betas": (0.9, 0.999), "groups": [{"params": [0, None]}]},
        "name": f"step {seed}",
        "done": False,
    }


def change(state: dict[str, Any]) -> None:
    """Change an `example_state` in place, as an optimizer does."""
    for tensor in state["model"].values():
        tensor.zero_()
    state["optimizer"]["lr"] = -1.0


def bits(state: Any) -> Any:
    """A copy of ``state`` that compares equal to another one if all bits are equal."""
    if isinstance(state, torch.Tensor):
        flat = state.detach().contiguous().reshape(-1).view(torch.uint8)
        return (str(state.dtype), tuple(state.shape), flat.numpy().tobytes())
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [bits(value) for value in state]
    return state


class InMemoryTransport(CheckpointTransport[Any]):
    """Heals within one process: the simplest transport that keeps the contract.

    Start from it for a transport of your own, or use it in tests whose replica groups are threads.
    """

    _sources: ClassVar[dict[str, InMemoryTransport]] = {}

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._changed = threading.Condition()
        self._step = -1
        self._state: Any = None
        self._refused = ""
        self._sources[self._name] = self

    def metadata(self) -> str:
        """A name within this process."""
        return self._name

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta
    ) -> None:
        """See `CheckpointTransport.send_checkpoint`; the state is copied."""
        state = copy.deepcopy(state_dict)
        with self._changed:
            self._step, self._state, self._refused = step, state, ""
            self._changed.notify_all()

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, why: str) -> None:
        with self._changed:
            self._step, self._state, self._refused = step, None, why
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        """Return at once: what was offered is a copy."""

    def retract_checkpoint(self) -> None:
        with self._changed:
            self._step, self._state = -1, None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        source = self._sources.get(metadata)
        if source is None:
            raise Unreachable(f"replica rank {src_rank}", metadata, "it was shut down")
        return source._copy_of(step, timeout, f"replica rank {src_rank}")

    def _copy_of(self, step: int, timeout: timedelta, name: str) -> Any:
        with self._changed:
            if not self._changed.wait_for(lambda: self._step == step, timeout.total_seconds()):
                raise DeadlineExceeded(f"receiving the state of {name}", timeout.total_seconds())
            if self._refused:
                raise CheckpointError(name, self._refused)
            return copy.deepcopy(self._state)

    def shutdown(self, wait: bool = True) -> None:
        self._sources.pop(self._name, None)
