"""Tests torch's own functions over every class of process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from support.meeting_place import MeetingPlace, marked
from support.training import together
from torch.distributed import HashStore
from torch.distributed.device_mesh import DeviceMesh

from torchft_svc.client import ProcessGroup

from .test_collectives import KINDS

# Torch has given some of these functions newer names.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module", params=marked(KINDS))
def pair(request: pytest.FixtureRequest) -> Iterator[list[ProcessGroup]]:
    """Two members, both known by name to torch's world of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    groups = [KINDS[request.param]() for _ in range(2)]
    for index, group in enumerate(groups):
        group.register(f"{request.param}_{index}")
    MeetingPlace().configure(*groups)
    yield groups
    for group in groups:
        group.shutdown()
    dist.destroy_process_group()


def own(group: ProcessGroup, numel: int = 2) -> torch.Tensor:
    """0, 1, ... of the first member, 10, 11, ... of the second."""
    return torch.arange(numel, dtype=torch.float32) + 10 * group.rank()


class Mine:
    """Torch's functions with ``group=``, whose results are in tensors of the caller's."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group: Any = group
        self.is_first = group.rank() == 0

    def all_gather(self) -> Any:
        outputs = [torch.zeros(2), torch.zeros(2)]
        dist.all_gather(outputs, own(self.group), group=self.group)
        return torch.stack(outputs).tolist()

    def all_gather_into_tensor(self) -> Any:
        output = torch.zeros(4)
        dist.all_gather_into_tensor(output, own(self.group), group=self.group)
        return output.tolist()

    def all_gather_object(self) -> Any:
        outputs: list[Any] = [None, None]
        dist.all_gather_object(outputs, {"rank": self.group.rank()}, group=self.group)
        return outputs

    def all_reduce(self) -> Any:
        tensor = own(self.group)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        work.wait()
        return tensor.tolist()

    def all_reduce_complex(self) -> Any:
        tensor = torch.complex(own(self.group), own(self.group))
        dist.all_reduce(tensor, group=self.group)
        return tensor.tolist()

    def all_to_all_single(self) -> Any:
        output = torch.zeros(4)
        dist.all_to_all_single(output, own(self.group, 4), group=self.group)
        return output.tolist()

    def barrier(self) -> Any:
        dist.barrier(group=self.group)

    def broadcast(self) -> Any:
        tensor = own(self.group)
        dist.broadcast(tensor, group_src=1, group=self.group)
        return tensor.tolist()

    def gather(self) -> Any:
        outputs = [torch.zeros(2), torch.zeros(2)] if self.is_first else None
        dist.gather(own(self.group), outputs, group_dst=0, group=self.group)
        return outputs and torch.stack(outputs).tolist()

    def reduce_scatter_tensor(self) -> Any:
        output = torch.zeros(2)
        dist.reduce_scatter_tensor(output, own(self.group, 4), group=self.group)
        return output.tolist()

    def scatter(self) -> Any:
        output = torch.zeros(2)
        parts = [own(self.group), own(self.group) + 5] if self.is_first else None
        dist.scatter(output, parts, group_src=0, group=self.group)
        return output.tolist()

    def send_and_recv(self) -> Any:
        tensor = own(self.group)
        if self.is_first:
            dist.send(tensor, group_dst=1, group=self.group)
        else:
            dist.recv(tensor, group_src=0, group=self.group)
        return tensor.tolist()


EXPECTED: dict[str, tuple[Any, Any]] = {
    "all_gather": ([[0, 1], [10, 11]],) * 2,
    "all_gather_into_tensor": ([0, 1, 10, 11],) * 2,
    "all_gather_object": ([{"rank": 0}, {"rank": 1}],) * 2,
    "all_reduce": ([10, 12],) * 2,
    "all_reduce_complex": ([10 + 10j, 12 + 12j],) * 2,
    "all_to_all_single": ([0, 1, 10, 11], [2, 3, 12, 13]),
    "barrier": (None,) * 2,
    "broadcast": ([10, 11],) * 2,
    "gather": ([[0, 1], [10, 11]], None),
    "reduce_scatter_tensor": ([10, 12], [14, 16]),
    "scatter": ([0, 1], [5, 6]),
    "send_and_recv": ([0, 1],) * 2,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_function_that_takes_a_group(pair: list[ProcessGroup], name: str) -> None:
    found = together(*(lambda group=group: getattr(Mine(group), name)() for group in pair))
    assert found == list(EXPECTED[name])


# By rank in the group: what functional collectives make of it, given a group or a mesh.
FUNCTIONAL: dict[str, tuple[Callable[[ProcessGroup, Any], Any], tuple[Any, Any]]] = {
    "all_reduce": (
        lambda group, over: functional.all_reduce(own(group), "avg", over),
        ([5, 6],) * 2,
    ),
    "all_gather_tensor": (
        lambda group, over: functional.all_gather_tensor(own(group), 0, over),
        ([0, 1, 10, 11],) * 2,
    ),
    "reduce_scatter_tensor": (
        lambda group, over: functional.reduce_scatter_tensor(own(group, 4), "sum", 0, over),
        ([10, 12], [14, 16]),
    ),
    "all_to_all_single": (
        lambda group, over: functional.all_to_all_single(own(group, 4), [2, 2], [2, 2], over),
        ([0, 1, 10, 11], [2, 3, 12, 13]),
    ),
    "broadcast": (
        lambda group, over: functional.broadcast(own(group), 0, over),
        ([0, 1],) * 2,
    ),
}


@pytest.mark.parametrize("over_mesh", [False, True], ids=["group", "mesh"])
@pytest.mark.parametrize("name", FUNCTIONAL)
def test_a_functional_collective(pair: list[ProcessGroup], name: str, *, over_mesh: bool) -> None:
    call, expected = FUNCTIONAL[name]
    over: list[Any] = [
        DeviceMesh.from_group(group, "cpu", mesh_dim_names=("replicate",)) if over_mesh else group
        for group in pair
    ]

    def use(index: int) -> Any:
        return call(pair[index], over[index]).tolist()

    assert together(lambda: use(0), lambda: use(1)) == list(expected)
