"""Soft policies on torchrun's own back ends, which have to be asked what has changed.

They report that nodes wait to join, not that one is lost; a new world begins when all nodes of the
one before have asked for it. So an agent of a world asks again and again whether somebody waits,
and asks for another world when its workers have left theirs.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
)

from torchft_svc.core.launch.world import (
    AgentLeave,
    AgentState,
    AgentStatus,
    AgentWelcome,
    Node,
    RunClosed,
    World,
    WorldNews,
)

log = logging.getLogger(__name__)

# How long the nodes of a world that has just begun may take to describe themselves.
NODES_TIMEOUT_S = 30.0
# A rendezvous under way cannot be ended; a process that exits does not wait for it.
CLOSE_TIMEOUT_S = 2.0
_NODE, _FINISHED = "torchft/node", "torchft/finished"


class WorldOver:
    """News: the present world is to be followed by another one."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeetingFailed:
    """News: there is no way to the others, and there will be none."""

    error: Exception


PolledNews = WorldNews | WorldOver | MeetingFailed


class PolledMeeting:
    """Asks ``handler`` on a thread of its own, every ``interval_s`` while workers work."""

    def __init__(
        self,
        handler: RendezvousHandler,
        node: Node,
        interval_s: float,
        on_news: Callable[[PolledNews], None],
    ) -> None:
        self._handler = handler
        self._node = node
        self._interval_s = interval_s
        self._on_news = on_news
        self._has_changed = threading.Condition()
        self._state: AgentState | None = None
        self._is_closed = False
        self._store: Any = None  # of the present world
        self._num_nodes = 0
        self._asked_for_next = 0  # the round after which another world was asked for
        self._thread = threading.Thread(target=self._run, name="polled-rendezvous", daemon=True)
        self._thread.start()

    def send_state(self, state: AgentState) -> None:
        """Act on ``state``, which replaces the one before."""
        with self._has_changed:
            self._state = state
            self._has_changed.notify_all()

    def send_leave(self, leave: AgentLeave) -> None:
        """Close the rendezvous, if the run is over for all."""
        self.close()
        if leave.closes and not self._thread.is_alive():
            self._handler.shutdown()

    def close(self) -> None:
        """No news comes any more. May be called twice."""
        with self._has_changed:
            self._is_closed = True
            self._has_changed.notify_all()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        self._send_news(AgentWelcome(self._interval_s))
        try:
            while (state := self._next_state()) is not None:
                self._act(state)
        except RendezvousClosedError as error:
            reason = str(error) or "a node has finished, or failed too often"  # c10d does not say
            self._send_news(RunClosed(f"the rendezvous was closed: {reason}", failed=True))
        except (RendezvousError, DistError) as error:
            self._send_news(MeetingFailed(error))
        except Exception as error:
            if not is_error_of_etcd(error):
                log.exception("the rendezvous failed")
            self._send_news(MeetingFailed(error))

    def _next_state(self) -> AgentState | None:
        """The newest one, every now and then; None: the end."""
        with self._has_changed:
            before = self._state
            self._has_changed.wait_for(
                lambda: self._is_closed or self._state is not before, self._interval_s
            )
            while self._state is None and not self._is_closed:
                self._has_changed.wait()
            return None if self._is_closed else self._state

    def _act(self, state: AgentState) -> None:
        if state.status in (AgentStatus.JOINING, AgentStatus.READY):
            if state.store_port:
                self._meet(state)
        elif state.status is AgentStatus.WORKING:
            is_asked = self._asked_for_next == state.round
            if not is_asked and self._handler.num_nodes_waiting() > 0:
                self._asked_for_next = state.round
                self._send_news(WorldOver())
        elif state.status is AgentStatus.FINISHED and self._store is not None:
            self._end_with_all()

    def _meet(self, state: AgentState) -> None:
        joined = self._handler.next_rendezvous()
        self._store, self._num_nodes = joined.store, joined.world_size
        me = {**dataclasses.asdict(self._node), "port": state.store_port, "round": state.round}
        joined.store.set(f"{_NODE}/{joined.rank}", json.dumps(me))
        keys = [f"{_NODE}/{rank}" for rank in range(joined.world_size)]
        try:
            joined.store.wait(keys, timedelta(seconds=NODES_TIMEOUT_S))
        except DistError as error:
            log.warning("a node of the new world is gone, ask for another one: %s", error)
            return
        nodes = [json.loads(joined.store.get(key)) for key in keys]
        port, round_ = nodes[0]["port"], max(node["round"] for node in nodes) + 1
        fields = {field.name for field in dataclasses.fields(Node)}
        world = World(
            round_,
            tuple(Node(**{name: node[name] for name in fields}) for node in nodes),
            port,
        )
        with self._has_changed:  # a state from before this world asks for no other one
            if self._state is state:
                self._state = None
        self._send_news(world)

    def _end_with_all(self) -> None:
        """All nodes of the world have finished: the run is over. So it is without the store, whose
        host may have been the last one to finish."""
        try:
            if not self._wait_for_all():
                return
            reason = "all nodes have finished"
        except Exception as error:  # noqa: BLE001 - whatever it is, its workers have finished
            log.warning("cannot wait for the other nodes any longer: %s", error)
            reason = "the store of the run is gone"
        self._send_news(RunClosed(reason, failed=False))

    def _wait_for_all(self) -> bool:
        """Whether they have finished, and this is not closed."""
        finished = int(self._store.add(_FINISHED, 1))
        while finished < self._num_nodes:
            with self._has_changed:
                if self._has_changed.wait_for(lambda: self._is_closed, self._interval_s):
                    return False
            finished = int(self._store.add(_FINISHED, 0))
        return True

    def _send_news(self, news: PolledNews) -> None:
        with self._has_changed:
            is_closed = self._is_closed
        if not is_closed:
            self._on_news(news)


def is_error_of_etcd(error: BaseException) -> bool:
    """Whether it is of the package that torch's back ends for etcd use, if that is installed."""
    return type(error).__module__.partition(".")[0] == "etcd"
