"""Tests every collective on every class of process group beside torch's own group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collective_calls import NAMES, Calls, expected
from support.meeting_place import MeetingPlace, marked
from support.training import together
from torch.distributed import HashStore

from torchft_svc.client import (
    ErrorSwallowingProcessGroupWrapper,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupDummy,
    ProcessGroupGloo,
)
from torchft_svc.client.process_groups.operations import COLLECTIVES, OLDER_NAMES
from torchft_svc.testing import FakeProcessGroupWrapper

# The first isolated groups of all wait until torch is imported, on a machine that may be busy.
TIMEOUT = timedelta(seconds=60)
NUM_MEMBERS = 3
KINDS: dict[str, Callable[[], ProcessGroup]] = {
    "gloo": lambda: ProcessGroupGloo(TIMEOUT),
    "swallowing": lambda: ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo(TIMEOUT)),
    "baby": lambda: ProcessGroupBabyGloo(TIMEOUT),
    "fake": lambda: FakeProcessGroupWrapper(ProcessGroupGloo(TIMEOUT)),
}
# What gloo can carry (of small values, in which bfloat16's sums are exact).
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
)
# What it can carry in some collectives, and in which.
PARTLY = {
    torch.complex64: (
        "allreduce",
        "allreduce_coalesced",
        "reduce_scatter",
        "reduce_scatter_base",
        "reduce_scatter_tensor_coalesced",
        "broadcast",
        "reduce",
        "send_and_recv",
    ),
    torch.int16: ("send_and_recv",),
    torch.float8_e4m3fn: ("send_and_recv",),
}
CASES = [
    *itertools.product(NAMES, DTYPES),
    *((name, dtype) for dtype, names in PARTLY.items() for name in names),
]
# These hand every call on to another group, whatever its tensors hold.
WRAPPERS = ("swallowing", "fake")


@pytest.fixture(scope="module")
def members(request: pytest.FixtureRequest) -> Iterator[list[ProcessGroup]]:
    groups = [KINDS[request.param]() for _ in range(NUM_MEMBERS)]
    MeetingPlace().configure(*groups)
    yield groups
    for group in groups:
        group.shutdown()


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    """Torch's own groups, with the same members."""
    store = HashStore()

    def connect(rank: int) -> Any:
        backend = dist.ProcessGroupGloo(store, rank, NUM_MEMBERS, TIMEOUT)
        group = dist.ProcessGroup(store, rank, NUM_MEMBERS)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return group

    return together(*(lambda rank=rank: connect(rank) for rank in range(NUM_MEMBERS)))


def outcomes(groups: list[Any], name: str, dtype: torch.dtype) -> list[Any]:
    """What each member has afterwards; a refusal by its text."""

    def call(group: Any) -> Any:
        try:
            return getattr(Calls(group, dtype=dtype), name)()
        except (RuntimeError, ValueError) as error:
            return str(error).splitlines()[0]

    return together(*(lambda group=group: call(group) for group in groups))


@pytest.mark.parametrize(
    ("members", "name", "dtype"),
    [
        pytest.param(*kind.values, name, dtype, marks=kind.marks)
        for kind in marked(KINDS)
        for name, dtype in CASES
        if dtype is torch.float32 or kind.values[0] not in WRAPPERS
    ],
    indirect=["members"],
)
def test_a_collective_gives_what_torch_s_own_group_gives(
    members: list[ProcessGroup], plain: list[Any], name: str, dtype: torch.dtype
) -> None:
    theirs = outcomes(plain, name, dtype)
    if isinstance(theirs[0], str):  # older gloo knows no alltoall
        pytest.skip(f"torch's own group refuses: {theirs[0]}")
    assert outcomes(members, name, dtype) == theirs
    if dtype is torch.float32:
        assert theirs == [expected(rank, NUM_MEMBERS)[name] for rank in range(NUM_MEMBERS)]


def test_no_collective_of_torch_is_left_out() -> None:
    others = {"abort", "shutdown", "rank", "size", "name", "boxed", "unbox", "set_timeout"}
    others |= {"split_group", "merge_remote_group", "monitored_barrier", "get_group_store"}
    offered = {
        name
        for name in vars(dist.ProcessGroup)
        if callable(getattr(dist.ProcessGroup, name)) and name[0].islower()
    } - others
    offered = {name for name in offered if "symm_mem" not in name}
    ours = COLLECTIVES | OLDER_NAMES.keys()
    assert offered <= ours
    for name in ours:
        assert name in vars(ProcessGroup)


@pytest.mark.parametrize("name", NAMES)
def test_the_dummy_is_a_group_of_one(name: str) -> None:
    dummy = ProcessGroupDummy()
    dummy.configure("nowhere:1/x", "a", 0, 1)
    assert getattr(Calls(dummy), name)() == expected(0, 1)[name]


@pytest.mark.parametrize("members", marked(KINDS), indirect=True)
def test_newer_names_reach_the_same_operations(members: list[ProcessGroup]) -> None:
    def call(group: ProcessGroup) -> list[float]:
        output = torch.zeros(NUM_MEMBERS)
        group.all_gather_single(output, torch.tensor([group.rank() + 1.0])).wait()
        return output.tolist()

    assert (
        together(*(lambda group=group: call(group) for group in members))
        == [[1.0, 2.0, 3.0]] * NUM_MEMBERS
    )
