"""LocalSGD: groups train alone, and average their weights after every so many updates.

Stich, Local SGD Converges Fast and Communicates Little, 2018 (arXiv 1805.09767).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchft_svc.client.algorithms.agreed_weights import DEFAULT_BUCKET_MB, BucketedAverage
from torchft_svc.client.algorithms.periodic_sync import MAX_ATTEMPTS, PeriodicSync

if TYPE_CHECKING:
    from torchft_svc.client.manager import Manager

_STATE_KEY = "LocalSGD"


class LocalSGD(PeriodicSync):
    """Averages the weights of all groups after every ``sync_every`` updates of ``optimizer``::

        with LocalSGD(manager, model, sgd, sync_every=100):
            for inputs, labels in batches:
                sgd.zero_grad()
                loss(model(inputs), labels).backward()
                sgd.step()  # each 100th one averages the weights

    After a synchronization the parameters are bitwise equal in all groups; buffers, such as the
    running averages of batch normalization, are not touched. A refused synchronization is repeated
    at once, so a group that is lost costs the others nothing. After several refusals the parameters
    are those of the last synchronization again. The averages need as much memory as the parameters
    until the vote.

    Args:
        manager: returns the model and ``optimizer`` from its state functions.
        model: the module whose parameters are averaged; not wrapped across groups.
        optimizer, sync_every: see `PeriodicSync`.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(
        self, manager: Manager, model: nn.Module, optimizer: torch.optim.Optimizer, sync_every: int
    ) -> None:
        super().__init__(manager, [model], optimizer, sync_every)
        (self._weights,) = self._agreed
        self._averaging = BucketedAverage(manager, self._weights.local_tensors(), DEFAULT_BUCKET_MB)
        self._register({_STATE_KEY: (self._load_state_dict, self._state_dict)})

    def sync(self) -> None:
        """Average the weights now; all groups have to call it at the same point.

        Blocks until the groups have met and voted.

        Raises:
            PeerError: there is no quorum (with ``use_async_quorum=False``).
            CommitFailed: more synchronizations in a row were refused than the manager allows.
        """
        self._count = 0
        for _ in range(MAX_ATTEMPTS):
            self._begin_sync()
            self._averaging.launch(self._weights.write_weights)
            self._averaging.wait()
            if self._commit_sync(self._apply, self._refuse):
                return
        self._restore(self._refuse)

    def _end_inner_step(self) -> None:
        if self._count >= self._sync_every:
            self.sync()

    @torch.no_grad()
    def _apply(self) -> None:
        averages = self._averaging.pop_averages()
        for tensor, average in zip(self._weights.local_tensors(), averages, strict=True):
            tensor.copy_(average)
        self._weights.store()

    def _refuse(self) -> None:
        self._averaging.drop_averages()
        self._weights.restore()

    def _state_dict(self) -> dict[str, Any]:
        return {"original_parameters": self._weights.state_dict()}

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        self._weights.load_state_dict(state["original_parameters"])
