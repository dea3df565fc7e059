"""Tests the state that groups heal by: its pieces, its readers, and what it may hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.training import (
    DEADLINE_S,
    TIMEOUT,
    Trainer,
    assert_identical,
    bits,
    in_step,
    lighthouse,
    together,
)

from torchft_svc.client import CheckpointTransport, HTTPTransport, PGTransport, ProcessGroupGloo
from torchft_svc.client.step.state import ReadGate, StateRegistry, join
from torchft_svc.errors import CheckpointError, ConfigError, DeadlineExceeded


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse() as address:
        yield address


@pytest.fixture(params=["http", "pg"])
def options(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The options of a manager, for either transport."""
    group = ProcessGroupGloo(TIMEOUT)
    transport: CheckpointTransport[Any] = PGTransport(group, TIMEOUT)
    if request.param == "http":
        transport = HTTPTransport(TIMEOUT, hostname="127.0.0.1")
    yield {"pg": group, "checkpoint_transport": transport}
    transport.shutdown()
    group.shutdown()


class Unknown:
    """A value that cannot be sent."""


def test_a_state_that_cannot_be_sent_is_refused_when_the_manager_starts(
    address: str, options: dict[str, Any]
) -> None:
    def save() -> Any:
        return {"optim": {"hook": Unknown()}}

    with pytest.raises(ConfigError, match=r"state_dict\['default'\]\['optim'\]\['hook'\].*Unknown"):
        Trainer(address, "a", 0, state_dict=save, **options)


def test_a_state_that_cannot_be_sent_is_refused_when_it_is_registered(
    address: str, options: dict[str, Any]
) -> None:
    with Trainer(address, "a", 0, **options) as trainer:
        with pytest.raises(ConfigError, match=r"state_dict\['more'\]\[0\].*Unknown"):
            trainer.manager.register_state_dict_fn("more", lambda _: None, lambda: [Unknown()])
        assert trainer.step()  # as if it had not been tried


def test_a_state_that_is_not_there_yet_is_looked_at_in_the_first_step_of_a_group_alone(
    address: str, options: dict[str, Any]
) -> None:
    made: dict[str, Any] = {}
    with Trainer(address, "a", 0, **options) as trainer:
        trainer.manager.register_state_dict_fn("later", made.update, lambda: {"x": made["later"]})
        made["later"] = Unknown()
        with pytest.raises(ConfigError, match=r"\['later'\]\['x'\].*Unknown"):
            trainer.step()


class Gated(HTTPTransport[Any]):
    """Receives when it may, and reports when it has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.may_receive, self.has_received = threading.Event(), threading.Event()

    def recv_striped(self, *args: Any) -> Any:
        assert self.may_receive.wait(DEADLINE_S)
        try:
            return super().recv_striped(*args)
        finally:
            self.has_received.set()


class GatedPG(PGTransport):
    """The same over a process group."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.may_receive, self.has_received = threading.Event(), threading.Event()

    def recv_checkpoint(self, *args: Any) -> Any:
        assert self.may_receive.wait(DEADLINE_S)
        try:
            return super().recv_checkpoint(*args)
        finally:
            self.has_received.set()


class Momentum(Trainer):
    """A model whose forward pass changes its state, as a queue, codebook or encoder does."""

    def __init__(self, address: str, name: str, seed: int, kind: str, **options: Any) -> None:
        group = ProcessGroupGloo(TIMEOUT)
        self.transport: Any = (
            Gated(TIMEOUT, hostname="127.0.0.1", chunk_bytes=1 << 16)
            if kind == "http"
            else GatedPG(group, TIMEOUT)
        )
        self.num_passes = 0
        self.codebook = torch.full((50_000,), float(seed))
        self.written = torch.full((10,), float(seed))
        self.on_forward: Callable[[], None] = lambda: None
        super().__init__(
            address, name, seed, pg=group, checkpoint_transport=self.transport, **options
        )
        self.model.register_forward_pre_hook(lambda *_: self.change())

    def change(self) -> None:
        """All of it goes by the weights alone, so that groups agree."""
        self.on_forward()
        value = self.model[0].weight.detach().sum()  # type: ignore[union-attr,operator]
        self.codebook.mul_(0.5).add_(value)
        self.written.data.mul_(0.5).add_(value)  # torch does not note this
        self.num_passes += 1

    def state_dict(self) -> dict[str, Any]:
        mine = {"codebook": self.codebook, "written": self.written, "passes": self.num_passes}
        return super().state_dict() | mine

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.codebook.copy_(state["codebook"])
        self.written.copy_(state["written"])
        self.num_passes = state["passes"]


def meets_once(healthy: Momentum, joiner: Momentum, num_groups: int) -> None:
    """Begin steps until ``joiner`` is in one; let its heal and that forward pass race the bad way.

    With a synchronous quorum the pass is over before the heal begins; else it begins after that.
    """
    is_async = healthy.manager._rules.use_async_quorum

    def on_forward() -> None:
        healthy.manager.wait_quorum()
        quorum = healthy.manager.last_quorum()
        if is_async and quorum is not None and quorum.replica_world_size == num_groups:
            joiner.transport.may_receive.set()
            assert joiner.transport.has_received.wait(DEADLINE_S)

    healthy.on_forward = on_forward
    while not joiner.transport.may_receive.is_set():
        healthy.optimizer.zero_grad()
        loss = healthy.loss()
        quorum = healthy.manager.last_quorum()
        if quorum is not None and quorum.replica_world_size == num_groups:
            joiner.transport.may_receive.set()
        loss.backward()
        assert healthy.optimizer.step()


@pytest.mark.parametrize("kind", ["http", "pg"])
@pytest.mark.parametrize("use_async_quorum", [False, True])
def test_i3_state_that_the_forward_pass_changes_is_healed_as_of_one_moment(
    address: str, kind: str, use_async_quorum: bool
) -> None:
    options = {"kind": kind, "use_async_quorum": use_async_quorum}
    with Momentum(address, "a", 0, **options) as a:
        a.transport.may_receive.set()
        a.steps(2)
        with Momentum(address, "b", 1, **options) as b:
            together(lambda: meets_once(a, b, 2), b.step)
            step = max(each.manager.current_step() for each in (a, b))
            in_step(step, a, b)
            assert_identical([a, b])
            with Momentum(address, "c", 2, **options) as c:
                together(lambda: meets_once(a, c, 3), lambda: meets_once(b, c, 3), c.step)
                in_step(max(each.manager.current_step() for each in (a, b, c)), a, b, c)
                assert_identical([a, b, c])
                in_step(a.manager.current_step() + 2, a, b, c)
                assert_identical([a, b, c])
                assert c.num_passes == c.manager.current_step()  # all of them, each once


@pytest.mark.parametrize("kind", ["http", "pg"])
def test_who_waits_for_the_rest_of_a_step_that_is_given_up_heals_in_the_next(
    address: str, kind: str
) -> None:
    with Momentum(address, "a", 0, kind) as a:
        a.steps(2)
        with Momentum(address, "b", 1, kind) as b:

            def gives_up() -> None:
                def on_forward() -> None:
                    a.manager.wait_quorum()
                    quorum = a.manager.last_quorum()
                    if quorum is not None and quorum.replica_world_size == 2:
                        a.on_forward = lambda: None
                        b.transport.may_receive.set()
                        assert b.transport.has_received.wait(DEADLINE_S)
                        raise ZeroDivisionError("of the test")

                a.on_forward = on_forward
                with pytest.raises(ZeroDivisionError):
                    a.until(1_000_000)
                a.meets(2)

            before = time.monotonic()
            together(gives_up, lambda: b.meets(2))
            assert time.monotonic() - before < TIMEOUT.total_seconds()
            in_step(max(each.manager.current_step() for each in (a, b)) + 1, a, b)
            assert bits(a.model.state_dict()) == bits(b.model.state_dict())


def test_a_shut_gate_keeps_readers_out_until_it_is_opened() -> None:
    gate = ReadGate()
    gate.shut(DEADLINE_S)
    with pytest.raises(DeadlineExceeded, match="being changed"), gate.reading(0.01):
        pass
    entered = threading.Event()

    def reads() -> None:
        with gate.reading(DEADLINE_S):
            entered.set()

    reader = threading.Thread(target=reads)
    reader.start()
    assert not entered.is_set()
    gate.open()
    reader.join(DEADLINE_S)
    assert entered.is_set()


def test_shutting_waits_for_readers_and_gives_up_in_time() -> None:
    gate = ReadGate()
    with gate.reading(0.0):
        with pytest.raises(DeadlineExceeded, match="waiting for readers"):
            gate.shut(0.01)
        with gate.reading(0.0):  # the gate is as it was
            pass
    gate.shut(0.0)


def test_the_registry_collects_and_loads_by_key() -> None:
    registry = StateRegistry()
    loaded: dict[str, object] = {}
    registry.register("one", lambda state: loaded.update(one=state), lambda: 1)
    registry.register("two", lambda state: loaded.update(two=state), lambda: 2)
    state = registry.collect({"step": 3, "batches_committed": 6}, 0.0)
    assert state == {
        "user": {"one": 1, "two": 2},
        "torchft": {"step": 3, "batches_committed": 6},
    }
    assert registry.check(state, "there") == {"step": 3, "batches_committed": 6}
    registry.load(state)
    assert loaded == {"one": 1, "two": 2}


@pytest.mark.parametrize("state", [None, [], {"user": {}}, {"user": {"x": 1}, "torchft": {}}])
def test_a_foreign_state_is_refused(state: object) -> None:
    registry = StateRegistry()
    registry.register("one", print, dict)
    with pytest.raises(CheckpointError, match="from there"):
        registry.check(state, "there")


def test_bad_pieces_are_refused() -> None:
    registry = StateRegistry()
    registry.register("one", print, dict)
    with pytest.raises(ConfigError, match=r"key='one'.*another piece"):
        registry.register("one", print, dict)
    with pytest.raises(ConfigError, match="key=''"):
        registry.register("", print, dict)
    with pytest.raises(ConfigError, match="state_dict=3"):
        registry.register("two", print, 3)  # type: ignore[arg-type]


def test_a_preview_of_the_rest_calls_the_programs_functions_once() -> None:
    """Marks stand where the early part that was shown before has tensors."""
    linear, calls = torch.nn.Linear(3, 2), []
    linear.bias.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1, momentum=0.9)
    linear(torch.ones(3)).sum().backward()
    optimizer.step()

    def save() -> Any:
        calls.append(1)
        return {"model": linear.state_dict(), "more": torch.ones(2), "epoch": 3}

    registry = StateRegistry(lambda state: None, save)
    registry.own(optimizer)
    counters = {"step": 5}
    early = registry.collect_early(1.0)
    calls.clear()
    rest = registry.collect_deferred(counters, 1.0)
    assert len(calls) == 1
    expected = registry.collect_rest(early, counters, 1.0)
    assert str(rest) == str(expected)
    assert "torchft.early_tensor" in str(rest)
    joined = join(early.state, rest, "here")
    assert torch.equal(joined["user"]["default"]["model"]["weight"], linear.weight)
