"""Tests microbatches of a model that FSDP2 has sharded: only the last one of a step is summed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.reading import BATCH, Numbers, ReadingGroup
from support.torch_world import alone_in_torch
from support.training import lighthouse, make_manager
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from torchft_svc.client import Optimizer, replicate_across_groups
from torchft_svc.client.data import ElasticDataLoader, ElasticSampler
from torchft_svc.errors import ConfigError

_NUM_STEPS = 3


@pytest.fixture
def inside() -> Iterator[None]:
    """The process group of a worker that is alone in its group."""
    with alone_in_torch():
        yield


@pytest.mark.usefixtures("inside")
def test_microbatches_of_a_sharded_model() -> None:
    with lighthouse() as address, ReadingGroup(address, "a", microbatch_size=3) as alone:
        model = copy.deepcopy(alone.model)
        expected = alone.until(_NUM_STEPS).weights()
    with lighthouse() as address, make_manager(address, "b") as manager:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        replicate_across_groups(manager, model)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = Optimizer(manager, sgd)
        torchs = DataLoader(Numbers(), sampler=ElasticSampler(Numbers(), seed=5))
        loader = ElasticDataLoader(manager, torchs, global_batch_size=BATCH, microbatch_size=3)
        batches = iter(loader)
        while manager.current_step() < _NUM_STEPS:
            features, targets, _ = next(batches)
            with loader.accumulate(model):
                loss = (model(features) - targets).square().mean() * loader.weight
                torch.autograd.backward(loss)
            assert (next(model.parameters()).grad is not None) == loader.ends_step
            if loader.ends_step:
                assert optimizer.step()
                optimizer.zero_grad()
        whole: Any = [each.full_tensor().flatten() for each in model.parameters()]  # type: ignore[attr-defined]
        torch.testing.assert_close(torch.cat(whole), expected, rtol=1e-12, atol=1e-14)
        next(batches)
        plain = loader.accumulate(nn.Linear(1, 1))
        with pytest.raises(ConfigError, match="no wrapped model"), plain:
            pass
