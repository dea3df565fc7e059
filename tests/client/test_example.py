"""Tests that the design's own example runs as printed, and that the order of arguments holds."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.documents import code_blocks, sides
from support.running import ROOT
from support.training import lighthouse
from torch import nn, optim

import torchft_svc
from torchft_svc.client import (
    DistributedDataParallel,
    FaultToleranceManager,
    Manager,
    OptimizerWrapper,
    ProcessGroupDummy,
)

ORDER = (
    "pg load_state_dict state_dict min_replica_size use_async_quorum timeout quorum_timeout "
    "connect_timeout rank world_size world_size_mode store_addr store_port lighthouse_addr "
    "replica_id port hostname heartbeat_interval checkpoint_transport init_sync max_retries "
    "quorum_retries"
)


@pytest.mark.processes
def test_the_example_as_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 2)
    criterion = nn.CrossEntropyLoss()
    dataloader = [(torch.randn(3, 4), torch.tensor([0, 1, 1])) for _ in range(5)]

    def state_dict() -> dict[str, torch.Tensor]:
        return model.state_dict()

    def load_state_dict(state: dict[str, torch.Tensor]) -> None:
        model.load_state_dict(state)

    with lighthouse() as address:
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", address)
        manager = FaultToleranceManager(state_dict, load_state_dict)
        optimizer = OptimizerWrapper(manager, optim.SGD(model.parameters(), lr=0.1))
        model = DistributedDataParallel(manager, model)  # type: ignore[assignment]
        for inputs, labels in dataloader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
            if manager.current_step() >= 3:
                break
        assert manager.current_step() == 3
        manager.step()
        criterion(model(inputs), labels).backward()
        assert manager.should_commit()
        manager.shutdown()


def readme_programs() -> tuple[str, str]:
    """The loop of the README, before and after its ten lines."""
    (diff,) = (block.text for block in code_blocks(ROOT / "README.md") if block.language == "diff")
    assert sum(line.startswith("+") for line in diff.splitlines()) == 10
    return sides(diff)


def test_the_readmes_plain_loop_runs() -> None:
    before, _ = readme_programs()
    assert "range(1000)" in before
    names: dict[str, Any] = {}
    exec(before.replace("range(1000)", "range(3)"), names)  # noqa: S102 - it is ours
    assert names["step"] == 2


@pytest.mark.processes
def test_the_readmes_loop_runs_with_its_ten_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = readme_programs()
    assert "< 1000:" in after
    names: dict[str, Any] = {}
    with lighthouse() as address:
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", address)
        exec(after.replace("< 1000:", "< 3:"), names)  # noqa: S102 - it is ours
    assert names["manager"].current_step() == 3
    assert before.count("optimizer.step()") == after.count("optimizer.step()") == 1


def test_arguments_come_in_the_familiar_order() -> None:
    positional = [
        name
        for name, parameter in inspect.signature(Manager.__init__).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    assert positional[1:] == ORDER.split()


def test_arguments_by_position() -> None:
    with lighthouse() as address:
        manager = Manager(
            ProcessGroupDummy(),
            lambda state: None,
            dict,
            1,
            False,
            timedelta(seconds=5),
            timedelta(seconds=6),
            lighthouse_addr=address,
            in_process=True,
        )
        with manager:
            manager.start_quorum()
            tensor = torch.tensor([2.0])
            manager.allreduce(tensor).wait()
            assert tensor.item() == 2.0
            assert manager.should_commit()


def test_the_names_can_be_imported_from_the_top() -> None:
    assert set(torchft_svc.__all__) == set(torchft_svc.client.__all__)
    for name in torchft_svc.__all__:
        assert getattr(torchft_svc, name) is getattr(torchft_svc.client, name)
