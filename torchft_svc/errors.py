"""Every error of this package::

    TorchFTError
    ├── UsageError                  the caller's mistake: repeat it and it fails again
    │   ├── ConfigError             a value or a pair of values that cannot work   (ValueError)
    │   ├── AddressError            an address that cannot be parsed or bound      (ValueError)
    │   ├── RequestRefused          a request that breaks the protocol: wrong step, wrong rank, ...
    │   │   ├── OperationsDiffer    the groups are at different operations of one step
    │   │   └── GroupDiffers        a group's model, settings or state are not those of the others
    │   ├── StateDiverged           the groups' states differ, although they have to be equal
    │   └── Unauthorized            a token or certificate that the other side does not take
    └── PeerError                   a peer's or the network's: trying again may help
        ├── Unreachable             nobody answers at that address                 (ConnectionError)
        │   └── GivenUp             and nobody starts that service any more
        ├── NotLeader               another lighthouse leads; has its address if it is known
        ├── DeadlineExceeded        an answer did not come in time                 (TimeoutError)
        ├── QuorumFailed            this round has no quorum; has the reason
        │   └── MemberLost          a member of a quorum that was formed is gone
        ├── CommitFailed            this vote has no answer; has the reason
        ├── GroupLeft               the group was drained: it takes part in no quorum any more
        ├── ChannelClosed           an agent and its worker cannot reach each other any more
        ├── SessionEnded            the other end of a parameter server's session is gone
        ├── WorkerLost              another worker of this group is gone, or frozen
        ├── WorkerEnding            there is no other world for a worker that its agent ends
        ├── WorldSuperseded         a process group of a world that another one has replaced
        ├── TrainingFailed          workers were lost, and no retry of the trainer is left
        ├── WorkerFailed            the user's program raised an error in a worker of a trainer
        ├── HealthCheckFailed       this machine has not passed the check before it joins
        └── CheckpointError         a checkpoint that is missing, truncated or corrupt
            └── TornState           and a part of it has replaced the worker's own state

`Drained`, a ``SystemExit``, ends a worker of a group that has left, with exit status 0 unless the
environment names another. A fault of our own is an ``AssertionError``. Errors hold their fields,
survive pickle and write their sentence in ``__str__``. ``is_final`` distinguishes what a restart of
the program cannot mend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


class TorchFTError(Exception):
    """Base of every error raised by this package.

    ``is_final``: a restart of the program cannot mend it, so a scheduler should not try that. An
    address that is taken may be free soon, and most refusals are of a moment: those are not final.
    """

    is_final: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), dict(self.__dict__))


def _rebuild(cls: type[TorchFTError], fields: dict[str, Any]) -> TorchFTError:
    error = cls.__new__(cls)
    error.__dict__.update(fields)
    return error


class UsageError(TorchFTError):
    """The caller's mistake; the sentence says what to change."""


class PeerError(TorchFTError):
    """A peer or the network failed; a later attempt may succeed."""


@dataclass(eq=False)
class ConfigError(UsageError, ValueError):
    """``field`` holds ``value``, which cannot work because of ``reason``."""

    field: str
    value: object
    reason: str

    is_final = True

    def __str__(self) -> str:
        return f"{self.field}={self.value!r} cannot work: {self.reason}"


@dataclass(eq=False)
class AddressError(UsageError, ValueError):
    """``address`` cannot be parsed or bound because of ``reason``."""

    address: str
    reason: str

    def __str__(self) -> str:
        return f"address {self.address!r}: {self.reason}"


@dataclass(eq=False)
class RequestRefused(UsageError):
    """A request that the protocol does not allow, with the ``reason``."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(eq=False)
class OperationsDiffer(RequestRefused):
    """The groups are at different operations of one step; ``reason`` names both sides.

    ``is_misfit``: it is this group that does not fit. The others train already, or nobody does.
    """

    is_misfit: bool = False


class GroupDiffers(RequestRefused):
    """This group's model, settings or state are not those of the others, whatever it does."""

    is_final = True


@dataclass(eq=False)
class StateDiverged(UsageError):
    """A check has found groups whose states differ, in step ``step``.

    ``reason`` is the sentence that says what differs, ``groups`` the names of the groups that are
    not like the others. ``last_equal``: the step of the last check without a difference (None:
    there was none).
    """

    reason: str
    step: int
    groups: tuple[str, ...]
    last_equal: int | None = None

    is_final = True

    def __str__(self) -> str:
        return self.reason


@dataclass(eq=False)
class Unauthorized(UsageError):
    """The two sides do not trust each other; ``reason`` says what to set."""

    reason: str

    is_final = True

    def __str__(self) -> str:
        return f"not authorized: {self.reason}"


@dataclass(eq=False)
class Unreachable(PeerError, ConnectionError):
    """No answer from ``peer`` (its role, such as ``lighthouse``) at ``address``."""

    peer: str
    address: str
    reason: str

    def __str__(self) -> str:
        return f"{self.peer} at {self.address} cannot be reached: {self.reason}"


class GivenUp(Unreachable):
    """Whoever starts ``peer`` has done so again and again, and will not any more."""


@dataclass(eq=False)
class NotLeader(PeerError):
    """This lighthouse does not lead; ``leader`` does (empty: nobody, or nobody knows yet)."""

    leader: str

    def __str__(self) -> str:
        known = f"the leader is {self.leader}" if self.leader else "the leader is not known yet"
        return f"this lighthouse does not lead; {known}"


@dataclass(eq=False)
class DeadlineExceeded(PeerError, TimeoutError):
    """``action`` took longer than ``timeout_s`` seconds."""

    action: str
    timeout_s: float
    reason: str = ""

    def __str__(self) -> str:
        tail = f": {self.reason}" if self.reason else ""
        return f"{self.action} timed out after {self.timeout_s:.3g} s{tail}"


@dataclass(eq=False)
class QuorumFailed(PeerError):
    """No quorum in this round, because of ``reason``."""

    reason: str

    def __str__(self) -> str:
        return f"no quorum: {self.reason}"


class MemberLost(QuorumFailed):
    """A member of the quorum is gone; what it had sent by then is good."""


@dataclass(eq=False)
class CommitFailed(PeerError):
    """The commit vote has no result, because of ``reason``."""

    reason: str

    def __str__(self) -> str:
        return f"no commit decision: {self.reason}"


@dataclass(eq=False)
class GroupLeft(PeerError):
    """The group has left the lighthouse for good, because of ``reason``."""

    reason: str

    def __str__(self) -> str:
        return f"this group has left: {self.reason}"


@dataclass(eq=False)
class ChannelClosed(PeerError, ConnectionError):
    """The ``channel`` between an agent and a worker cannot be used any more, for ``reason``."""

    channel: str
    reason: str

    def __str__(self) -> str:
        return f"the channel {self.channel} is closed: {self.reason}"


@dataclass(eq=False)
class SessionEnded(PeerError, ConnectionError):
    """The ``peer`` of a parameter server's session (``server`` or ``client``) is gone."""

    peer: str
    reason: str

    def __str__(self) -> str:
        return f"the {self.peer} of this session is gone: {self.reason}"


@dataclass(eq=False)
class WorkerLost(PeerError, ConnectionError):
    """A worker of this group has ended, or was silent for ``timeout_s``, during ``action``."""

    action: str
    timeout_s: float

    def __str__(self) -> str:
        return (
            f"{self.action}: another worker of this group has ended, or has not answered for "
            f"{self.timeout_s:.3g} s; all workers of the group have to be started again"
        )


@dataclass(eq=False)
class WorkerEnding(PeerError):
    """The agent of this worker ends it, for ``reason``: there is no other world for it."""

    reason: str

    def __str__(self) -> str:
        return f"there is no world for this worker, its launcher is ending it: {self.reason}"


@dataclass(eq=False)
class WorldSuperseded(PeerError):
    """World ``round`` was replaced before its process group was there: ask for the next one."""

    round: int
    reason: str

    def __str__(self) -> str:
        return f"world {self.round} has no process group: {self.reason}"


@dataclass(eq=False)
class TrainingFailed(PeerError):
    """A trainer, or a launcher, has lost workers, and has no retry left after ``num_retries``.

    ``is_final``: its restarts did not get beyond a step, so another one would not either.
    """

    reason: str
    num_retries: int
    is_final: bool = False

    def __str__(self) -> str:
        return f"training has ended after {self.num_retries} retries: {self.reason}"


@dataclass(eq=False)
class WorkerFailed(PeerError):
    """The user's program raised an error of class ``kind`` in a worker of a trainer.

    ``traceback`` is the worker's. ``is_repeated``: the same error came twice at this step, so it
    was not tried again. ``is_final``: it would come again, for that reason or another one.
    """

    kind: str
    step: int
    is_repeated: bool
    traceback: str
    is_final: bool = False

    def __str__(self) -> str:
        again = ", again, so it was not tried once more" if self.is_repeated else ""
        return f"a worker raised {self.kind} at step {self.step}{again}\n\n{self.traceback}"


@dataclass(eq=False)
class HealthCheckFailed(PeerError):
    """The health check ``command`` of this machine failed: ``how``, and its ``last_line``.

    Another machine may pass it, so a scheduler should start the program again.
    """

    command: str
    how: str
    last_line: str = ""

    def __str__(self) -> str:
        printed = f": {self.last_line}" if self.last_line else ""
        return f"this machine does not join: the health check {self.command!r} {self.how}{printed}"


class Drained(SystemExit):
    """Ends a worker between two steps, after its group has left.

    The exit status is ``exit_code`` of the class: 0, or what ``TORCHFT_DRAINED_EXIT_CODE`` names
    for a scheduler that would take 0 for the end of the training.

    Not a `TorchFTError`, nor any `Exception`: a training loop that survives errors must not survive
    this. Who wants to save a checkpoint first may catch it.
    """

    exit_code: ClassVar[int] = 0  # of this process; its `Manager` sets it

    def __init__(self, reason: str) -> None:
        super().__init__(self.exit_code)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


@dataclass(eq=False)
class CheckpointError(PeerError):
    """A checkpoint from ``source`` is missing, truncated or corrupt."""

    source: str
    reason: str

    def __str__(self) -> str:
        return f"checkpoint from {self.source}: {self.reason}"


class TornState(CheckpointError):
    """A part of the checkpoint has replaced the worker's own state: that is no step's now."""
