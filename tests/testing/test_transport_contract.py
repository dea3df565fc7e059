"""Tests that every transport of ours keeps the contract, and that a broken one is found out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.meeting_place import MeetingPlace

from torchft_svc.client import HTTPTransport, PGTransport, ProcessGroupGloo
from torchft_svc.testing.transport_contract import (
    InMemoryTransport,
    Pair,
    TransportContract,
)

TIMEOUT = timedelta(seconds=20)


class TestInMemory(TransportContract):
    @contextlib.contextmanager
    def pair(self) -> Iterator[Pair]:
        yield InMemoryTransport(), InMemoryTransport()


class TestHTTP(TransportContract):
    @contextlib.contextmanager
    def pair(self) -> Iterator[Pair]:
        with (
            HTTPTransport[Any](TIMEOUT, hostname="127.0.0.1") as source,
            HTTPTransport[Any](TIMEOUT, hostname="127.0.0.1") as receiver,
        ):
            yield source, receiver


class TestPG(TransportContract):
    @contextlib.contextmanager
    def pair(self) -> Iterator[Pair]:
        groups = [ProcessGroupGloo(TIMEOUT) for _ in range(2)]
        MeetingPlace().configure(*groups)
        yield PGTransport(groups[0], TIMEOUT), PGTransport(groups[1], TIMEOUT)
        for group in groups:
            group.shutdown()


class SendsTheLiveState(InMemoryTransport):
    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, _: Any) -> None:
        with self._changed:
            self._step, self._state = step, state_dict
            self._changed.notify_all()


class HandsOutItsOwn(SendsTheLiveState):
    def _copy_of(self, *_: Any) -> Any:
        with self._changed:
            assert self._changed.wait_for(lambda: self._state is not None, 5)
            return self._state


class TakesAnyStep(InMemoryTransport):
    def _copy_of(self, step: int, timeout: timedelta, name: str) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._step >= 0, timeout.total_seconds())
            return super()._copy_of(self._step, timeout, name)


class LosesPrecision(InMemoryTransport):
    def _copy_of(self, *arguments: Any) -> Any:
        state = super()._copy_of(*arguments)
        state["model"]["half"] = state["model"]["half"].to(torch.float32)
        return state


class WaitsForEver(InMemoryTransport):
    def __init__(self) -> None:
        super().__init__()
        self._shut_down = threading.Event()

    def _copy_of(self, step: int, timeout: timedelta, name: str) -> Any:
        try:
            return super()._copy_of(step, timeout, name)
        except TimeoutError:
            return self._shut_down.wait()

    def shutdown(self, wait: bool = True) -> None:
        super().shutdown(wait)
        self._shut_down.set()


class RaisesAnything(InMemoryTransport):
    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        return self._sources[metadata]._copy_of(step, timeout, "")


class DisallowsSlowly(InMemoryTransport):
    def disallow_checkpoint(self) -> None:
        threading.Event().wait(0.6)


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (SendsTheLiveState, "test_the_state_may_change_once_it_is_disallowed"),
        (HandsOutItsOwn, "test_what_arrives_is_the_receivers_own"),
        (TakesAnyStep, "test_another_step_is_an_error"),
        (LosesPrecision, "test_a_state_arrives_bit_by_bit"),
        (WaitsForEver, "test_a_state_that_nobody_offers_is_an_error_in_time"),
        (RaisesAnything, "test_a_source_that_is_gone_is_an_error_in_time"),
        (DisallowsSlowly, "test_disallowing_waits_for_no_receiver"),
    ],
)
def test_a_broken_transport_is_found_out(broken: type[InMemoryTransport], rule: str) -> None:
    class Contract(TransportContract):
        timeout = timedelta(seconds=1)
        short = timedelta(seconds=0.2)

        @contextlib.contextmanager
        def pair(self) -> Iterator[Pair]:
            yield broken(), broken()

    with pytest.raises((AssertionError, KeyError)):
        getattr(Contract(), rule)()
