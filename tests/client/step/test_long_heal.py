"""Tests a heal that takes longer than the other groups wait."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from support.running import eventually
from support.training import DEADLINE_S, Trainer, assert_identical, together

from torchft_svc.client.checkpointing import HTTPTransport
from torchft_svc.coordination import LighthouseClient, LighthouseServer
from torchft_svc.core.quorum.activity import Phase

JOIN_S = 0.5


class Held(HTTPTransport[Any]):
    """A transport with a link so slow that the state arrives when the test allows it."""

    def __init__(self) -> None:
        super().__init__(timedelta(seconds=DEADLINE_S), hostname="127.0.0.1")
        self.arrives = threading.Event()

    def recv_striped(self, *what: Any, **more: Any) -> Any:
        assert self.arrives.wait(DEADLINE_S)
        return super().recv_striped(*what, **more)


def test_a_heal_that_is_longer_than_the_join_timeout_succeeds() -> None:
    """The others wait, and see why; nobody is left out, so nobody has to begin again."""
    with (
        LighthouseServer(
            "127.0.0.1:0",
            min_replicas=1,
            join_timeout_ms=int(JOIN_S * 1000),
            heal_timeout_ms=int(DEADLINE_S * 1000),
        ) as server,
        Trainer(server.address(), "a", 0, quorum_timeout=timedelta(seconds=DEADLINE_S)) as a,
        LighthouseClient(server.address(), timedelta(seconds=20)) as client,
    ):
        a.steps(2)
        transport = Held()
        with (
            Trainer(server.address(), "b", 1, checkpoint_transport=transport) as b,
            ThreadPoolExecutor(2) as threads,
        ):
            heals = threads.submit(b.step)
            try:
                assert a.meets(2)
                waits = threads.submit(a.step)
                # For longer than the join timeout; a stall may skip the first second.
                longer = re.compile(r" heals since [1-9]\d* s")
                eventually(lambda: longer.search(client.status()[0].waiting_for))
                (_, healing) = client.status()[0].groups
                assert (healing.phase, healing.left_out) == (Phase.HEALING, False)
                assert not waits.done()
            finally:
                transport.arrives.set()
            assert heals.result(DEADLINE_S)
            quorum = a.manager.last_quorum()
            b.step()
            assert waits.result(DEADLINE_S)
            together(a.step, b.step)
            assert_identical([a, b])
            assert quorum is not None
            assert a.manager.last_quorum() == quorum, "b was in every quorum since it joined"
