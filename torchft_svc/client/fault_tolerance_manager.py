"""The manager under the names and with the arguments of the design paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchft_svc.client.manager import Manager
from torchft_svc.errors import RequestRefused

if TYPE_CHECKING:
    from torchft_svc.client.checkpointing.transport import CheckpointTransport
    from torchft_svc.client.process_groups.base import ProcessGroup
    from torchft_svc.coordination import ManagerClient, ManagerServer
    from torchft_svc.manager_server.supervisor import ManagerSupervisor


class FaultToleranceManager(Manager):
    """A `Manager` with the constructor, the ``step`` and the attributes of the design paper.

    Every other keyword is the manager's own. As in the paper, ``load_state_dict`` is the function
    that was given: to continue from a periodic checkpoint, give its step to the first `step`.

    Attributes:
        save_state_dict: returns the state that another group heals by, as it was given.
        load_state_dict: loads such a state, as it was given.
    """

    save_state_dict: Callable[[], Any]

    def __init__(
        self,
        save_state_dict: Callable[[], Any],
        load_state_dict: Callable[[Any], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(state_dict=save_state_dict, load_state_dict=load_state_dict, **kwargs)
        self.save_state_dict = save_state_dict
        self.load_state_dict = load_state_dict  # type: ignore[assignment, method-assign]

    def step(self, step: int | None = None) -> None:
        """Begin a step, as `start_quorum` does.

        Args:
            step: the number of updates in the weights. In the first call it is that of the
                checkpoint that was loaded, and `batches_committed` counts from there. Later it has
                to be `current_step`, which stays the same after a discarded step, and is the healed
                one after a heal: a loop must not count it by itself. None: `current_step`.

        Raises:
            ConfigError: ``step`` is no whole number, or below 0.
            RequestRefused: the manager is at another step; no step was begun.
            PeerError, Drained: see `Manager.start_quorum`.
        """
        state = self._worker.state
        # The second is that of a heal whose step was given up before the state was loaded.
        if step is not None and step not in (state.step, self.current_step()):
            if state.epoch > 0 or state.step > 0:
                raise RequestRefused(
                    f"step({step}) was called, but the weights have {state.step} updates: call "
                    "step(manager.current_step()), which also follows discarded steps and heals"
                )
            Manager.load_state_dict(self, {"step": step, "batches_committed": 0})
        self.start_quorum()

    @property
    def lighthouse_address(self) -> str:
        """The lighthouse's ``host:port``, or several with commas between."""
        return self._runtime.lighthouse_address

    @property
    def client(self) -> ManagerClient:
        """This worker's connection to its group's manager."""
        return self._runtime.deps.client

    @property
    def manager(self) -> ManagerServer | ManagerSupervisor | None:
        """The group's manager on rank 0, which runs it: in this process (``in_process``) or in a
        child process. None on the other ranks, and with ``manager_addr``."""
        return self._runtime.services.manager

    @property
    def checkpoint_server(self) -> CheckpointTransport[Any]:
        """The transport that serves this worker's state to groups that heal."""
        return self._runtime.deps.transport

    @property
    def pg(self) -> ProcessGroup:
        """The process group of the members of the quorum."""
        return self._runtime.deps.pg
