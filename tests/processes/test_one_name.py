"""Two living groups have one name: the newcomer is refused at once, the first is not disturbed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.bounds import check
from support.running import lighthouse_process

from tools.chaos.bounds import NEWS_S
from tools.chaos.fleet import Fleet
from tools.demo.events import Discarded, Exited, Joined

pytestmark = pytest.mark.processes


def test_the_newcomer_gets_a_clear_error_at_once(make_fleet: Callable[..., Fleet]) -> None:
    with lighthouse_process("--min-replicas=1") as lighthouse:
        fleet = make_fleet(lighthouse.address)
        fleet.start(0)
        fleet.all_meet({0})
        (second,) = fleet.start(0)
        ended = fleet.await_event(Exited, 30.0)
        asked = fleet.await_event(Joined, 0.0, wanted=lambda event: event.incarnation == 1)
        check("a second group has the name", ended.at - asked.at, NEWS_S)
        assert second.status == 1
        assert "group-0" in second.output()
        print(second.output()[-400:])
        assert not fleet.of(0, Discarded)
