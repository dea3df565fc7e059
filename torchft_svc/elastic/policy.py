"""Restart policies: what an agent does when workers fail, and when nodes come and go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torchft_svc.core.launch.restart import REACTIONS, Reaction, RestartPolicy, RunEvent
from torchft_svc.core.launch.world import FAILURE_WINDOW_S

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult

# How many failures of a node's workers within the failure window do not restart all of them.
MAX_SOFT_FAILURES = 3
# A worker that is stopped for longer has failed. The lighthouse gives a stopped node up after 5 s.
STOPPED_TIMEOUT_S = 10.0


class MonitoringAgent(Protocol):
    """The two loops of an `ElasticAgent`, of which a strategy runs one."""

    def run_hard(self) -> RunResult: ...
    def run_soft(self, strategy: SoftRestartPolicyStrategy, /) -> RunResult: ...


class RestartPolicyStrategy(ABC):
    """The monitoring loop of an agent, from the first world to the end of its workers.

    Write your own by a subclass of one of those below: call ``super().run(agent)`` between what you
    do before and after, or (soft) change `SoftRestartPolicyStrategy.reactions`. Give an instance of
    it as ``LaunchConfig(restart_policy=...)``.
    """

    @abstractmethod
    def run(self, agent: MonitoringAgent) -> RunResult:
        """Start the workers, watch over them, and return how they ended."""


class HardRestartPolicyStrategy(RestartPolicyStrategy):
    """torch's own loop: every change of the world, and every failure, restarts all workers."""

    def run(self, agent: MonitoringAgent) -> RunResult:
        """See base class."""
        return agent.run_hard()


@dataclass(frozen=True)
class SoftRestartPolicyStrategy(RestartPolicyStrategy):
    """Sends workers that live their next world; they go on in process.

    Args:
        policy: which of the soft ones.
        ready_timeout_s: for a worker to reach a new world, before it has failed; 0: no limit.
        max_soft_failures: more of them within the window restart all workers of the node.
        failure_window_s: how long a failure counts.
        stopped_timeout_s: a worker that is stopped for longer (SIGSTOP) has failed; 0: no limit.
    """

    policy: RestartPolicy = RestartPolicy.SOFT
    ready_timeout_s: float = 300.0
    max_soft_failures: int = MAX_SOFT_FAILURES
    failure_window_s: float = FAILURE_WINDOW_S
    stopped_timeout_s: float = STOPPED_TIMEOUT_S

    def reactions(self) -> Mapping[RunEvent, tuple[Reaction, ...]]:
        """The steps that each event begins: its row of the table in `core.launch.restart`."""
        return REACTIONS[self.policy]

    def run(self, agent: MonitoringAgent) -> RunResult:
        """See base class."""
        return agent.run_soft(self)
