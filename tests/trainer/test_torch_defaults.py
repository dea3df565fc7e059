"""Tests that torch's default device and dtype change neither the data nor the checkpoints of a
trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.torch_defaults import DEFAULTS, set_defaults, torch_defaults
from support.trained import FEATURES, Sharing, assert_equal, shared, weights
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from torchft_svc.client.data.plan import Turn
from torchft_svc.trainer import Trainer
from torchft_svc.trainer.checkpoint_tensors import read_tensors, write_tensors
from torchft_svc.trainer.data import batch_source

SIZE = 24


DATA = [torch.tensor(number) for number in range(SIZE)]


class Numbers(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(DATA)


class Listed(Dataset[torch.Tensor]):
    def __init__(self, data: list[torch.Tensor]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index]


class Made(Dataset[Any]):
    """Samples that are made on torch's default device when they are read."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(2)


class Reversed(Sampler[int]):
    """A sampler of the user's, which computes on torch's default device."""

    devices: list[str] = []  # noqa: RUF012

    def __iter__(self) -> Iterator[int]:
        self.devices.append(torch.zeros(1).device.type)
        return iter(reversed(range(SIZE)))


def sampled(sampler: Any, **options: Any) -> DataLoader[int]:
    return DataLoader(DATA, batch_size=3, sampler=sampler, **options)


SOURCES: dict[str, Callable[[], Any]] = {
    "dataset": lambda: Listed(DATA),
    "shuffled": lambda: DataLoader(DATA, batch_size=3, shuffle=True),
    "in order": lambda: DataLoader(DATA, batch_size=3),
    "replaced": lambda: sampled(RandomSampler(DATA, replacement=True, num_samples=40)),
    "weighted": lambda: sampled(WeightedRandomSampler([1.0] * SIZE, SIZE)),
    "subset": lambda: sampled(SubsetRandomSampler(range(SIZE))),
    "generator": lambda: sampled(SubsetRandomSampler(range(SIZE), torch.Generator("cpu"))),
    "stream": lambda: DataLoader(Numbers(), batch_size=3),
    "stream with a generator": lambda: DataLoader(
        Numbers(), batch_size=3, generator=torch.Generator("cpu")
    ),
    "processes": lambda: DataLoader(DATA, batch_size=3, shuffle=True, num_workers=1),
    "stream of processes": lambda: DataLoader(Numbers(), batch_size=3, num_workers=1),
}


def first_batches(make: Callable[[], Any]) -> list[list[int]]:
    with torch.device("cpu"):  # the program's part
        data = make()
    source = batch_source(data, 3, seed=5)
    batches = []
    for num_samples in (0, 3, 6):
        assert source.has_more(0, num_samples)
        drawn = source.draw(0, num_samples, Turn(0, 1))
        assert drawn is not None
        batches.append(drawn[0])
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.processes) if "processes" in name else name
        for name in SOURCES
    ],
)
@pytest.mark.parametrize("defaults", DEFAULTS[:2])
def test_the_samples_are_the_same(name: str, defaults: dict[str, Any]) -> None:
    expected = first_batches(SOURCES[name])
    with torch_defaults(defaults):
        assert first_batches(SOURCES[name]) == expected


def test_the_programs_own_code_keeps_its_default_device() -> None:
    with torch_defaults({"device": "meta"}):
        source = batch_source(DataLoader(Made(), batch_size=3), None, seed=5)
        assert source.has_more(0, 0)
        drawn = source.draw(0, 0, Turn(0, 1))
        assert drawn is not None
        assert drawn[0].device.type == "meta"
        assert batch_source(sampled(Reversed()), None, seed=5).has_more(0, 0)
        assert Reversed.devices == ["meta"]


@pytest.mark.parametrize("defaults", DEFAULTS)
def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path, defaults: dict[str, Any]) -> None:
    tensors = {
        "weights": torch.arange(12.0).reshape(3, 4),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "number": torch.tensor(7),
        "empty": torch.zeros(0, 2),
    }
    with torch_defaults(defaults):
        write_tensors(tmp_path, tensors)
        read = read_tensors(tmp_path)
    assert_equal(read, tensors)
    assert all(tensor.device.type == "cpu" for tensor in read.values())
    assert all(read[name].dtype == tensors[name].dtype for name in tensors)


# -- real workers ------------------------------------------------------------------------------


def make_model(config: Any) -> nn.Module:
    return nn.Linear(FEATURES, 1, device="cpu", dtype=torch.float32)


def make_data(config: Any) -> Any:
    with torch.device("cpu"):
        features = torch.arange(24.0 * FEATURES, dtype=torch.float32).reshape(24, FEATURES) / 100
        samples = TensorDataset(features, features.sum(1, keepdim=True))
        return samples, samples


def make_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


@pytest.fixture(scope="module")
def processes() -> Iterator[Sharing]:
    with shared() as backend:
        yield backend


def trained(processes: Sharing, folder: Path, mode: str, config: dict[str, Any]) -> Any:
    """The weights after two passes; all workers are new in the second one."""
    settings: dict[str, Any] = {
        "model_creator": make_model,
        "data_creator": make_data,
        "optimizer_creator": make_optimizer,
        "loss_creator": nn.MSELoss,
        "setup": set_defaults,
        "config": config,
        "num_workers": 2,
        "batch_size": 3,
        "fault_tolerance": mode,
        "backend": processes,
        "checkpoint_dir": str(folder),
        "show_progress": False,
    }
    with Trainer(**settings) as trainer:
        trainer.train(checkpoint="auto")
        trainer.save()
    with Trainer(**settings, resume="auto") as trainer:
        assert trainer.position.epoch == 1
        trainer.train()
        trainer.validate()
        return weights(trainer)


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["restart", "per-step"])
def test_setup_may_change_torchs_defaults(processes: Sharing, tmp_path: Path, mode: str) -> None:
    expected = trained(processes, tmp_path / "plain", mode, {})
    for number, defaults in enumerate(DEFAULTS[:3]):
        config: Any = defaults.values[0]
        assert_equal(trained(processes, tmp_path / str(number), mode, config), expected)
