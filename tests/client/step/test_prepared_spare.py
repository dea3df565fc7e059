"""A prepared spare takes a free place with the state that it has followed; in-process groups."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from support.running import eventually
from support.training import (
    TIMEOUT,
    Trainer,
    assert_identical,
    in_step,
    lighthouse,
    make_manager,
    together,
)
from torch import nn

from torchft_svc.client import Manager
from torchft_svc.coordination import JobStatus, LighthouseClient
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.errors import ConfigError, Drained

from .test_catch_up import FROZEN_BYTES, Partly


def status_of(client: LighthouseClient) -> JobStatus:
    (status,) = client.status()
    return status


class Standby:
    """The first steps of a prepared spare, on a thread; ``error``: what that has raised."""

    def __init__(self, spare: Trainer, client: LighthouseClient) -> None:
        self.spare = spare
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._step, daemon=True)
        self.thread.start()
        eventually(lambda: any(each.asks for each in status_of(client).prepared_spares))

    def _step(self) -> None:
        try:
            self.spare.meets(2)
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self.thread.join(TIMEOUT.total_seconds())
        assert not self.thread.is_alive()


def end_by_drain(trainer: Trainer) -> None:
    with pytest.raises(Drained):
        trainer.steps(1000)


def go_on_without(trainer: Trainer, name: str) -> None:
    """Train until the quorum has two groups, and group ``name`` is none of them."""
    while True:
        trainer.step()
        quorum = trainer.manager.last_quorum()
        names = [stable_name(each) for each in quorum.replica_ids] if quorum else []
        if len(names) == 2 and name not in names:
            return


@contextlib.contextmanager
def job(address: str) -> Iterator[tuple[Trainer, Trainer, LighthouseClient]]:
    with (
        contextlib.closing(LighthouseClient(address, TIMEOUT)) as client,
        Partly(address, "a", 0) as a,
        Partly(address, "b", 1) as b,
    ):
        together(lambda: a.meets(2), lambda: b.meets(2))
        yield a, b, client


def test_g2_a_spare_takes_the_place_of_a_drained_group_with_the_state_at_hand() -> None:
    with (
        lighthouse() as address,
        job(address) as (a, b, client),
        Partly(address, "c", 2, spare=True) as c,
    ):
        fetched = threading.Event()
        c.transport.after_preview = fetched.set
        standby = Standby(c, client)
        while not fetched.is_set():  # the members go on, which shows the spare what changes
            together(a.step, b.step)
        status = status_of(client)
        assert [group.in_quorum for group in status.groups] == [True, True]
        assert status.num_places == 2
        before = a.transport.proxy.num_bytes + b.transport.proxy.num_bytes
        client.drain("b", "it is preempted")
        together(lambda: go_on_without(a, "b"), lambda: end_by_drain(b))
        standby.join()
        in_step(a.manager.current_step() + 2, a, c)
        assert_identical([a, c])
        healed = a.transport.proxy.num_bytes + b.transport.proxy.num_bytes - before
        assert healed < FROZEN_BYTES / 2, "what does not change was at hand"
        assert status_of(client).prepared_spares == ()


def test_g7_a_spare_computes_before_a_place_is_free() -> None:
    with (
        lighthouse() as address,
        job(address) as (a, b, client),
        Partly(address, "c", 2, spare=True) as c,
    ):
        passes: list[int] = []
        c.model.register_forward_hook(lambda *_: passes.append(c.manager.current_step()))
        standby = Standby(c, client)
        eventually(lambda: bool(passes))
        together(a.step, b.step)
        assert [each.asks for each in status_of(client).prepared_spares] == [True]
        client.drain("b", "it is preempted")
        together(lambda: go_on_without(a, "b"), lambda: end_by_drain(b))
        standby.join()
        assert passes == [0], "the pass that has waited in its first sum is that of the first step"
        in_step(a.manager.current_step() + 2, a, c)
        assert_identical([a, c])


def test_g7_a_spare_with_a_parameter_on_a_device_does_not_compute_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The thread that waits in its first sum would be autograd's, and SIGTERM would not be handled.
    with lighthouse() as address, Trainer(address, "a", 0) as a:
        assert a.manager._sums.launches_here()
        beside = nn.Parameter(torch.empty(1, device="meta"))
        optimizer = torch.optim.SGD([beside])
        a.manager.register_optimizer(optimizer)
        assert not a.manager._sums.launches_here()
    with lighthouse() as address, make_manager(address, "b") as b:  # which knows no parameter
        assert b._sums.launches_here()
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert not b._sums.launches_here()


def test_g4_a_spare_can_be_drained_while_it_stands_by() -> None:
    with (
        lighthouse() as address,
        job(address) as (a, b, client),
        Trainer(address, "c", 2, spare=True) as c,
    ):
        standby = Standby(c, client)
        client.drain("c", "no longer needed")
        standby.join()
        assert isinstance(standby.error, Drained)
        assert status_of(client).prepared_spares == ()
        assert together(lambda: a.steps(2), lambda: b.steps(2)) == [[True, True]] * 2


def test_g4_spares_end_with_the_job() -> None:
    with (
        lighthouse() as address,
        job(address) as (a, b, client),
        Trainer(address, "c", 2, spare=True) as c,
    ):
        standby = Standby(c, client)
        a.manager.shutdown()
        b.manager.shutdown()
        standby.join()
        assert isinstance(standby.error, Drained)


def test_a_spare_needs_a_manager_of_its_own() -> None:
    with pytest.raises(ConfigError, match="already runs, as that of an ordinary group"):
        Manager(manager_addr="127.0.0.1:1", spare=True, timeout=timedelta(seconds=1))
