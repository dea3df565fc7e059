"""Restart policies: what an agent does when workers fail, and when nodes come and go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchft_svc.core.launch.restart import REACTIONS, Reaction, RestartPolicy, RunEvent
from torchft_svc.core.launch.world import FAILURE_WINDOW_S

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult

    from torchft_svc.elastic.agent import ElasticAgent

# Of the workers of a node within the failure window: more of them restart all of its workers.
MAX_SOFT_FAILURES = 3
# A worker that is stopped for longer has failed. The lighthouse misses a stopped node after 5 s.
STOPPED_TIMEOUT_S = 10.0


class RestartPolicyStrategy(ABC):
    """The monitoring loop of an agent, from the first world to the end of its workers.

    Write your own by a subclass of one of those below: call ``super().run(agent)`` between what you
    do before and after, or (soft) change `SoftRestartPolicyStrategy.reactions`. Give an instance of
    it as ``LaunchConfig(restart_policy=...)``.
    """

    @abstractmethod
    def run(self, agent: ElasticAgent) -> RunResult:
        """Start the workers, watch over them, and tell how they ended."""


class HardRestartPolicyStrategy(RestartPolicyStrategy):
    """torch's own loop: every change of the world, and every failure, restarts all workers."""

    def run(self, agent: ElasticAgent) -> RunResult:
        """See base class."""
        return agent.run_hard()


@dataclass(frozen=True)
class SoftRestartPolicyStrategy(RestartPolicyStrategy):
    """Workers that live are told of their next world, and go on in process.

    Args:
        policy: which of the soft ones.
        ready_timeout_s: for a worker to reach a new world, before it has failed; 0: no limit.
        max_soft_failures: more of them within the window restart all workers of the node.
        failure_window_s: for so long a failure counts.
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

    def run(self, agent: ElasticAgent) -> RunResult:
        """See base class."""
        return agent.run_soft(self)
