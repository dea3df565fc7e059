"""torchrun's rendezvous at a lighthouse: one server decides about worlds, and pushes them.

``torchrun --rdzv-backend lighthouse --rdzv-endpoint host:29510 --rdzv-id run --nnodes 1:4 ...``
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass

from torch.distributed.elastic.events import construct_and_record_rdzv_event
from torch.distributed.elastic.events.api import NodeState
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from torchft_svc import coordination
from torchft_svc.core.launch.agent_link import LinkNews, LinkTrouble
from torchft_svc.core.launch.world import (
    AgentLeave,
    AgentState,
    AgentStatus,
    AgentWelcome,
    RunClosed,
    RunWaiting,
    World,
    WorldPaused,
)
from torchft_svc.elastic.rendezvous.config import BACKEND, RendezvousConfig, rendezvous_config
from torchft_svc.elastic.rendezvous.link import RendezvousLink
from torchft_svc.elastic.rendezvous.own_lighthouse import own_lighthouse
from torchft_svc.elastic.rendezvous.stores import AgentStores, Watch, WorldChanged
from torchft_svc.env import Environment
from torchft_svc.errors import Unauthorized
from torchft_svc.host.exit_verdict import is_final
from torchft_svc.rpc.security import PLAIN

log = logging.getLogger(__name__)

# The lighthouse ends a wait that is too long, and says why; this is for one that is away.
_GRACE_S = 10.0
# How often a wait without news checks whether it has lasted too long.
_LOOK_S = 0.5


def rendezvous_at_lighthouse(params: RendezvousParameters) -> LighthouseRendezvous:
    """Make a rendezvous of torchrun's arguments, as `rendezvous_config` explains them.

    Raises:
        ConfigError, AddressError: an argument that cannot work.
    """
    config = rendezvous_config(
        endpoint=params.endpoint,
        run_id=params.run_id,
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        local_addr=params.local_addr,
        options=params.config,
    )
    return LighthouseRendezvous(config)


class NodeDrained(RendezvousClosedError):
    """An operator wants this node to end; torchrun shows it as an error."""


class RunGivenUp(RendezvousClosedError):
    """The run is over, and a restart of its launchers would not help."""

    is_final = True


class LighthouseRendezvous(RendezvousHandler):
    """Rendezvous of torch's agents, which stop their workers before each rendezvous.

    To be used on one thread; news come on another one. Without an endpoint it starts a lighthouse
    of its own, in this process.
    """

    def __init__(self, config: RendezvousConfig) -> None:
        self._config = config
        self._own_lighthouse: coordination.LighthouseServer | None = None
        self._link: RendezvousLink | None = None
        self._stores: AgentStores | None = None
        self._state = AgentState(status=AgentStatus.JOINING)
        self._joined: World | None = None  # the world that this agent's workers are in, or were
        self._num_rendezvous = self._num_failures = 0
        self._has_news = threading.Condition()
        self._latest = _LatestNews()

    # -- torch's interface -----------------------------------------------------------------------

    def get_backend(self) -> str:
        """See base class."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Each world has a fresh store in an agent, which workers may use."""
        return Environment().shares_agent_store

    def get_run_id(self) -> str:
        """See base class."""
        return self._config.run_id

    def is_closed(self) -> bool:
        """See base class."""
        with self._has_news:
            return self._latest.closed is not None

    def num_nodes_waiting(self) -> int:
        """At least 1 where the workers have to leave their world: nodes have come or are lost, or
        the run is closed."""
        with self._has_news:
            newer = self._newer_world()
            if newer is not None and self._joined is not None:
                return max(1, len(newer.nodes) - len(self._joined.nodes))
            return int(self._has_changed())

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a world with this node, and its store.

        Raises:
            RendezvousClosedError: the run is over.
            NodeDrained: an operator wants this node to end.
            RendezvousTimeoutError: there were too few nodes, or no free place, for too long.
            RendezvousConnectionError: there is no lighthouse, or it does not trust this node.
            RendezvousStateError: it refuses this node.
        """
        self._record(f"The node {self._node_id!r} attempts to join run {self.get_run_id()!r}.")
        try:
            info = self._join()
        except RendezvousError as error:
            self._record(f"{type(error).__name__}: {error}", NodeState.FAILED)
            raise
        text = (
            f"The node {self._node_id!r} has joined run {self.get_run_id()!r} as rank {info.rank}."
        )
        self._record(text, NodeState.SUCCEEDED, info.rank)
        return info

    @property
    def drained_within_s(self) -> float | None:
        """How long the workers of this node may take, if an operator drains it and has said so."""
        closed = self._latest.closed
        return None if closed is None else closed.within_s

    def record_failure(self) -> None:
        """Count a failure of this node's workers, for the lighthouse (rules L34 and L35)."""
        self._num_failures += 1

    def wait_for_change(self, timeout_s: float) -> bool:
        """Whether the workers have to leave their world, now or within ``timeout_s`` seconds."""
        with self._has_news:
            return self._has_news.wait_for(self._has_changed, timeout_s)

    def wait_for_others(self, timeout_s: float) -> bool:
        """This node's workers have finished; whether those of all others that live do, in time."""
        self._send_state(AgentStatus.FINISHED)
        with self._has_news:
            return self._has_news.wait_for(lambda: self._latest.closed is not None, timeout_s)

    def set_closed(self) -> None:
        """See base class."""
        self._leave(AgentLeave("its rendezvous was closed", closes=True))

    def shutdown(self) -> bool:
        """The agent has ended, and the run is over for all: failed, if an error is on its way."""
        error = sys.exc_info()[1]
        if error is None:
            leave = AgentLeave("its workers have finished", closes=True)
        else:
            reason = f"{type(error).__name__} on node {self._node_id}"
            leave = AgentLeave(reason, failed=True, closes=True, final=is_final(error))
        self._leave(leave)
        if self._own_lighthouse is not None:
            self._own_lighthouse.shutdown()
        return True

    # -- joining ---------------------------------------------------------------------------------

    @property
    def _node_id(self) -> str:
        return self._config.node.node_id

    def _join(self) -> RendezvousInfo:
        self._num_rendezvous += 1
        began_at = time.monotonic()
        while True:
            self._joined = world = self._next_world(began_at)
            try:
                return self._join_world(world)
            except WorldChanged:
                log.info("round %d was over before this node had joined it", world.round)

    def _next_world(self, began_at: float) -> World:
        latest, is_asking = self._latest, False
        with self._has_news:
            latest.is_outside = latest.is_in_world = False
        while True:
            with self._has_news:
                self._raise_why_not(time.monotonic() - began_at)
                world = self._newer_world()
                if world is not None:
                    latest.is_in_world = True
                    return world
                needs_store, latest.needs_store = latest.needs_store, False
                if is_asking and not needs_store:
                    self._has_news.wait(_LOOK_S)
                    continue
            if needs_store:
                self._opened_stores().renew()
            self._send_state(AgentStatus.JOINING)
            is_asking = True

    def _join_world(self, world: World) -> RendezvousInfo:
        stores = self._opened_stores()
        rank = world.node_ids.index(self._node_id)
        watch = Watch(
            self._has_changed, self.is_closed, lambda: self._send_state(AgentStatus.FINISHED)
        )
        store = stores.join(world, self._node_id, watch)
        self._send_state(AgentStatus.WORKING)
        if self.use_agent_store:
            master = RendezvousStoreInfo(world.master_addr, world.master_port)
        else:
            master = RendezvousStoreInfo.build(rank, store, self._config.node.host)
        return RendezvousInfo(store, rank, len(world.nodes), master)

    def _send_state(self, status: AgentStatus) -> None:
        """All workers of this node are in the world that was taken, unless they have ended."""
        state = AgentState(
            status=status,
            round=0 if self._joined is None else self._joined.round,
            reached=status is not AgentStatus.JOINING,
            store_port=self._opened_stores().spare_port,
            num_restarts=max(0, self._num_rendezvous - 1),
            num_failures=self._num_failures,
        )
        self._opened_link().send_state(state)

    def _raise_why_not(self, waited_s: float) -> None:
        """Raise if there will be no world, after ``waited_s`` seconds; called with the lock."""
        latest, timeout_s = self._latest, self._config.settings.join_timeout_s
        if latest.closed is not None:
            if latest.closed.drained:
                raise NodeDrained(latest.closed.reason)
            reason = f"run {self.get_run_id()!r} is over: {latest.closed.reason}"
            # What has ended because of the timeout, the lighthouse closes for all who waited.
            is_late = latest.closed.failed and waited_s >= timeout_s
            if latest.closed.final:
                raise RunGivenUp(reason)
            raise (RendezvousTimeoutError if is_late else RendezvousClosedError)(reason)
        if latest.trouble is not None:
            error = latest.trouble.error
            if latest.trouble.is_final and isinstance(error, Unauthorized):
                raise RendezvousConnectionError(str(error))
            if latest.trouble.is_final:
                raise RendezvousStateError(f"the lighthouse refuses this node: {error}")
            if not latest.was_welcome and waited_s > self._config.connect_timeout_s:
                raise RendezvousConnectionError(f"{error} (for {waited_s:.0f} s)")
        if waited_s > timeout_s + _GRACE_S:
            why = latest.why if latest.trouble is None else str(latest.trouble.error)
            raise RendezvousTimeoutError(f"no world with this node for {waited_s:.0f} s: {why}")

    # -- the link and the stores -----------------------------------------------------------------

    def _opened_stores(self) -> AgentStores:
        if self._stores is None:
            self._stores = AgentStores()
        return self._stores

    def _opened_link(self) -> RendezvousLink:
        """Return the open link; a new one for an agent that leaves and comes back."""
        if self._link is None:
            config = self._config
            endpoint, security = config.endpoint, None
            if not endpoint:
                self._own_lighthouse = own_lighthouse()
                endpoint, security = self._own_lighthouse.address(), PLAIN
            self._link = RendezvousLink(
                endpoint, config.run_id, config.node, config.settings, self._receive_news, security
            )
            atexit.register(self._leave_at_exit)
        return self._link

    def _leave(self, leave: AgentLeave) -> None:
        with self._has_news:
            if self._latest.closed is None and leave.closes:
                self._latest.closed = RunClosed(leave.reason, failed=leave.failed)
        if self._link is not None:
            atexit.unregister(self._leave_at_exit)
            self._link.send_leave(leave)

    def _leave_at_exit(self) -> None:
        """A signal ends this agent: the scheduler may start it again, and the others go on."""
        self._leave(AgentLeave("its agent has ended"))

    def _receive_news(self, news: LinkNews) -> None:
        with self._has_news:
            self._latest.record_news(news)
            self._has_news.notify_all()

    def _newer_world(self) -> World | None:
        world, taken = self._latest.world, self._joined
        return world if world is not None and world.round > (taken.round if taken else 0) else None

    def _has_changed(self) -> bool:
        """Whether the world that was taken last is over."""
        latest = self._latest
        is_refused = latest.trouble is not None and latest.trouble.is_final
        is_over = latest.closed is not None or latest.is_outside or is_refused
        return is_over or self._newer_world() is not None

    def _record(
        self, message: str, node_state: NodeState = NodeState.RUNNING, rank: int | None = None
    ) -> None:
        log.info("%s", message)
        construct_and_record_rdzv_event(
            run_id=self.get_run_id(),
            message=message,
            node_state=node_state,
            name=f"{type(self).__name__}.next_rendezvous",
            hostname=self._config.node.host,
            pid=os.getpid(),
            rank=rank,
        )


@dataclass(slots=True)
class _LatestNews:
    """The last news of a lighthouse."""

    world: World | None = None
    is_outside: bool = False  # the world that was taken is broken, or goes on without this node
    closed: RunClosed | None = None
    trouble: LinkTrouble | None = None  # the lighthouse is away
    was_welcome: bool = False
    is_in_world: bool = False  # and waits for no other one
    is_back: bool = False  # connected again, and has not received since that it is outside
    needs_store: bool = False  # a world that this agent has not received may have used its spare
    why: str = "no lighthouse has answered yet"

    def record_news(self, news: LinkNews) -> None:
        if isinstance(news, World):
            self.world, self.is_outside = news, False
        elif isinstance(news, WorldPaused | RunWaiting):
            self.is_outside, self.why = True, news.reason
            if isinstance(news, RunWaiting):  # rule L7
                self.needs_store |= self.is_in_world or self.is_back
                self.is_back = False
        elif isinstance(news, RunClosed):
            self.closed = news
        elif isinstance(news, LinkTrouble):
            self.trouble = news
        elif isinstance(news, AgentWelcome):
            self.is_back, self.trouble, self.was_welcome = self.was_welcome, None, True
            self.why = "the lighthouse has not said why"
