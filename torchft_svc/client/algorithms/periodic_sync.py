"""The base of algorithms whose groups train alone between synchronizations."""

from __future__ import annotations

import abc
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from torchft_svc.client.algorithms.agreed_weights import AgreedWeights
from torchft_svc.client.optim import Optimizer
from torchft_svc.client.reduce.reduction import CurrentParameter
from torchft_svc.errors import ConfigError, RequestRefused, TorchFTError

if TYPE_CHECKING:
    from torchft_svc.client.manager import Manager

log = logging.getLogger(__name__)

# How often a refused synchronization is tried before the weights are restored.
MAX_ATTEMPTS = 3

_NOT_HEALED = (
    "%d of %d %s are not in the state that groups heal by: a group that joins would go on with its "
    "own; return them from the manager's state_dict function"
)
_NOT_SYNCHRONIZED = (
    "%s trains %d parameters (the first one's shape is %s) that are in none of the modules which "
    "are synchronized: they will differ between groups"
)
_TRAINS_NOTHING = (
    "it trains none of the parameters that are synchronized: make it of the model's parameters, "
    "after whatever replaces them, such as fully_shard"
)
_ANOTHER_STEP = (
    "the program has ended the step of the manager in which an average was under way, or has begun "
    "another one, so the average is not applied: do neither between its launch and its end"
)


class PeriodicSync(abc.ABC):
    """Counts the updates of ``optimizer``, and calls `_end_inner_step` after each of them.

    A context manager around the training loop, on the thread that trains. An update inside of it is
    an *inner step*: this group applies it alone, and asks nobody. `Manager.current_step` counts
    synchronizations, not inner steps. A recipe derives from this class: it calls `_register` at the
    end of its constructor, decides in `_end_inner_step` when to synchronize, and calls
    `_commit_sync` between the sums of a step and its update.

    The groups of a job synchronize together, so they make as many inner steps. One that makes fewer
    a second lets the others wait in their next synchronization: for at most the lighthouse's join
    timeout before they go on without it, or the manager's ``timeout`` if it is in their quorum.

    Args:
        manager: has the model and ``optimizer`` in its state functions.
        models: disjoint modules whose parameters are synchronized.
        optimizer: applies the inner steps; a plain one, no `torchft_svc.Optimizer`.
        sync_every: inner steps from one synchronization to the next.
        settings: what else has to be equal in all groups, for the error of one that differs.
        backup_device: where the weights of the last synchronization are kept (default: the CPU).
        pin_memory: whether they are in pinned memory if they are on the CPU, and the model is not.

    Raises:
        ConfigError: an argument is invalid, or the manager serves another such algorithm.
    """

    def __init__(
        self,
        manager: Manager,
        models: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        sync_every: int,
        *,
        settings: str = "",
        backup_device: torch.device | str | None = None,
        pin_memory: bool = True,
    ) -> None:
        check_is_plain("optimizer", optimizer)
        if isinstance(sync_every, bool) or not isinstance(sync_every, int) or sync_every < 1:
            raise ConfigError("sync_every", sync_every, "a number of inner steps, 1 or more")
        device = torch.device("cpu" if backup_device is None else backup_device)
        self._manager = manager
        self._optimizer = optimizer
        self._sync_every = sync_every
        self._agreed = [AgreedWeights(model, device, pin_memory) for model in models]
        check_disjoint(self._agreed)
        check_trains("optimizer", optimizer, self._agreed)
        self._count = 0
        self._hooks: list[RemovableHandle] = []
        self._epoch = 0  # of the manager's step in which the synchronization is under way
        self._has_checked_state = False
        name = type(self).__name__
        parts = ", ".join(each.layout for each in self._agreed)
        described = "".join(f", {each}" for each in (settings,) if each)
        self._synced = SyncedWeights(
            f"{name} every {sync_every} inner steps{described}: {parts}", self._agreed
        )

    def _register(
        self, pieces: Mapping[str, tuple[Callable[[Any], None], Callable[[], Any]]]
    ) -> None:
        """Register ``pieces`` of state to heal by, and what is compared with other groups.

        ``pieces``: by name, functions that load and save it. Called once, as soon as all arguments
        are known to be valid.

        Raises:
            ConfigError: the manager serves another such algorithm.
        """
        check_serves_one(self._manager, type(self).__name__)
        for key, (load, save) in pieces.items():
            self._manager.register_state_dict_fn(key, load, save)
        self._manager.register_reducer(self._synced)

    @property
    def inner_steps(self) -> int:
        """The number of inner steps since the last synchronization."""
        return self._count

    def __enter__(self) -> PeriodicSync:
        if self._hooks:
            raise ConfigError(type(self).__name__, "entered twice", "leave the block first")
        check_owns_steps(self._manager, type(self).__name__)
        ref = weakref.ref(self)  # the optimizer must not keep this alive

        def before(*_: Any) -> None:
            if (this := ref()) is not None:
                this._manager.disallow_state_dict_read()

        def after(*_: Any) -> None:
            if (this := ref()) is not None:
                this._manager.allow_state_dict_read()
                this._count += 1
                this._end_inner_step()

        self._hooks = [
            self._optimizer.register_step_pre_hook(before),
            self._optimizer.register_step_post_hook(after),
        ]
        return self

    def __exit__(
        self,
        _: type[BaseException] | None,
        __: BaseException | None,
        ___: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._manager.allow_state_dict_read()  # an inner step may have raised

    @abc.abstractmethod
    def _end_inner_step(self) -> None:
        """Do what follows an inner step; runs inside of the optimizer's ``step``, at its end."""

    def _begin_sync(self) -> None:
        """Begin a step of the manager: a quorum."""
        self._manager.start_quorum()
        self._epoch = self._manager._worker.state.epoch
        if not self._has_checked_state:
            self._has_checked_state = True
            self._check_state()

    def _commit_sync(self, apply: Callable[[], None], restore: Callable[[], None]) -> bool:
        """Vote, and call ``apply`` on yes; returns whether the synchronization was committed.

        All workers of a group get the same answer, so all of them repeat one that was refused.
        ``restore`` is called if the vote raises.

        Raises:
            RequestRefused: the step of `_begin_sync` is over: the averages do not belong to this
                one.
        """
        try:
            is_over = self._manager._sums.is_between_steps()
            if is_over or self._manager._worker.state.epoch != self._epoch:
                raise RequestRefused(_ANOTHER_STEP)
            with self._manager.commit() as committed:
                if committed:
                    apply()
        except TorchFTError:
            self._restore(restore)
            raise
        return committed

    def _restore(self, restore: Callable[[], None]) -> None:
        self._manager.disallow_state_dict_read()
        try:
            restore()
        finally:
            self._manager.allow_state_dict_read()
        log.warning(
            "synchronization %d was refused: the weights are those of the last one",
            self._manager.current_step(),
        )

    def _check_state(self) -> None:
        """Warn of what a group that joins would lack."""
        parameters: list[torch.Tensor] = [
            each for agreed in self._agreed for each in agreed.parameters if each.requires_grad
        ]
        moments = [
            value
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        for name, tensors in (
            ("parameters of the model", parameters),
            (f"values of {type(self._optimizer).__name__}", moments),
        ):
            missing = self._manager._registry.missing(tensors)
            if missing:
                log.warning(_NOT_HEALED, len(missing), len(tensors), name)


class SyncedWeights:
    """What the groups synchronize, for the comparison with other groups; see `Reducing`."""

    def __init__(self, layout: str, agreed: Sequence[AgreedWeights]) -> None:
        self.layout = layout
        self.has_averaged = False
        self.parameters: Sequence[nn.Parameter] = ()
        self._agreed = agreed

    @property
    def names(self) -> Sequence[str]:
        return [name for each in self._agreed for name in each.names]

    def walk_parameters(self) -> list[CurrentParameter]:
        """See `Walking`; the weights of the last synchronization, which all groups share."""
        return [
            CurrentParameter(name, value, is_wrapped=True)
            for each in self._agreed
            for name, value in zip(each.names, each.values, strict=True)
        ]

    def replaced(self) -> list[str]:
        """See `Reducing.replaced`."""
        return [name for each in self._agreed for name in each.replaced()]

    def unsummed(self) -> list[tuple[str, nn.Parameter]]:
        """See `Reducing.unsummed`; gradients are not summed."""
        return []

    def average_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """See `Reducing.average_of`."""
        return None

    def begin_step(self) -> None:
        """See `Reducing.begin_step`."""

    def settle_step(self) -> Exception | None:
        """See `Reducing.settle_step`."""
        return None


def check_is_plain(argument: str, optimizer: Any) -> None:
    """Raise `ConfigError` unless ``optimizer`` is one of torch, whose step asks nobody."""
    if isinstance(optimizer, Optimizer) or not isinstance(optimizer, torch.optim.Optimizer):
        reason = "only a synchronization votes: give the plain torch optimizer, without a wrapper"
        raise ConfigError(argument, type(optimizer).__name__, reason)


def check_trains(
    argument: str, optimizer: torch.optim.Optimizer, agreed: Sequence[AgreedWeights]
) -> None:
    """Raise `ConfigError` if ``optimizer`` trains nothing of what is synchronized.

    Warns of what else it trains: only the inner steps of this group change that.
    """
    known = {id(parameter) for each in agreed for parameter in each.parameters}
    trained = [each for group in optimizer.param_groups for each in group["params"]]
    name = type(optimizer).__name__
    if known.isdisjoint(map(id, trained)):
        raise ConfigError(argument, name, _TRAINS_NOTHING)
    apart = [each for each in trained if each.requires_grad and id(each) not in known]
    if apart:
        log.warning(_NOT_SYNCHRONIZED, name, len(apart), tuple(apart[0].shape))


def check_serves_one(manager: Manager, algorithm: str) -> None:
    """Raise `ConfigError` if ``manager`` serves another algorithm of this package already."""
    if any(isinstance(each, SyncedWeights) for each in manager._sums.reducers()):
        reason = "its manager serves another algorithm: use one of them"
        raise ConfigError(algorithm, "a second one", reason)


def check_owns_steps(manager: Manager, algorithm: str) -> None:
    """Raise `ConfigError` if a loader of ``manager`` would begin its steps, too."""
    names = manager._stepper.data.names
    if names:
        reason = (
            "the manager's steps belong to the algorithm, and that loader begins one for each "
            "batch: read with torch's DataLoader, or with a loader that knows no manager"
        )
        raise ConfigError(algorithm, f"beside the loader {names[0]!r}", reason)


def check_fragments(manager: Manager, num: int, sync_every: int) -> None:
    """Raise `ConfigError` unless ``num`` fragments can take turns in ``sync_every`` inner steps.

    Also if ``manager`` heals during steps, not before them.
    """
    if manager.heals_during_steps():
        reason = "a group that joins has to heal before it contributes: it has to be False"
        raise ConfigError("use_async_quorum", True, reason)
    if not num:
        raise ConfigError("model_fragments", [], "one part of the model or more")
    if not isinstance(sync_every, int) or sync_every < num or sync_every % num:
        reason = f"a multiple of the number of fragments, which is {num}"
        raise ConfigError("sync_every", sync_every, reason)


def check_disjoint(agreed: Sequence[AgreedWeights]) -> None:
    """Raise `ConfigError` if a parameter belongs to two fragments."""
    owners: dict[int, int] = {}
    for number, each in enumerate(agreed):
        for name, parameter in zip(each.names, each.parameters, strict=True):
            other = owners.setdefault(id(parameter), number)
            if other != number:
                reason = f"it belongs to fragment {other}, too: each parameter is in one fragment"
                raise ConfigError(name, f"in fragment {number}", reason)
