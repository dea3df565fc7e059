"""Tests the state of sharded models: read on other threads, and sent to other workers."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.meeting_place import MeetingPlace
from support.torch_world import alone_in_torch
from support.training import TIMEOUT
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchft_svc.client import (
    PGTransport,
    ProcessGroup,
    ProcessGroupGloo,
    replicate_across_groups,
    sharded_state_dict,
)
from torchft_svc.client.checkpointing.encoding.serialization import describe, parse
from torchft_svc.client.checkpointing.encoding.shards import put_together, take_apart
from torchft_svc.client.step.state import StateRegistry
from torchft_svc.errors import CheckpointError, ConfigError, RequestRefused, TornState


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with alone_in_torch():
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))


class Averages:
    """The manager's part that a sharded model uses: it doubles instead of averaging."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._sums = self

    def average_gradients(self, tensor: torch.Tensor) -> Any:
        self.num_calls += 1
        tensor.mul_(2)
        return self

    def wait(self) -> bool:
        return True

    def has_ended(self) -> bool:
        return False

    def weights_version(self) -> int:
        return 0

    def register_reducer(self, _: Any) -> None:
        """What is summed is compared between groups elsewhere."""


class Tied(nn.Module):
    """Shared parameters, both kinds of buffers, a state of its own, and a part within a part."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.first = nn.Linear(3, 3, bias=False)
        self.last = nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("kept", torch.arange(2.0))
        self.register_buffer("dropped", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(self.inner(x)))

    def get_extra_state(self) -> int:
        return 7

    def set_extra_state(self, state: int) -> None:
        assert state == 7


def tied(mesh: DeviceMesh) -> Tied:
    model = Tied()
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def on_another_thread(action: Any) -> Any:
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(action())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcome[0]


def test_another_manager_s_hooks_replace_those_of_the_one_before(mesh: DeviceMesh) -> None:
    model = tied(mesh)
    managers = [Averages() for _ in range(3)]
    gone = [weakref.ref(manager) for manager in managers]

    def num_hooks() -> list[int]:
        return [
            len(module._forward_hooks) + len(module._state_dict_pre_hooks)
            for module in model.modules()
        ]

    before = num_hooks()
    replicate_across_groups(managers[0], model)  # type: ignore[arg-type]
    once = num_hooks()
    assert sum(once) > sum(before)
    for manager in managers[1:]:
        replicate_across_groups(manager, model)  # type: ignore[arg-type]
        assert num_hooks() == once
    model(torch.ones(1, 3)).sum().backward()
    assert [manager.num_calls for manager in managers] == [0, 0, 2]
    del manager, managers
    gc.collect()
    assert [ref() is None for ref in gone] == [True, True, False], "the model keeps the last one"


def test_the_state_is_that_of_torch_s_own_function(mesh: DeviceMesh) -> None:
    model = tied(mesh)
    ours, theirs = sharded_state_dict(model), model.state_dict()
    assert list(ours) == list(theirs)
    for key, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert isinstance(value, DTensor) == isinstance(theirs[key], DTensor)
            assert value.data_ptr() == theirs[key].data_ptr()
    model.load_state_dict(ours)


def test_the_state_is_whole_while_the_model_is_in_use(mesh: DeviceMesh) -> None:
    model = tied(mesh)
    seen: list[Any] = []
    model.last.register_forward_hook(lambda *_: seen.append(sharded_state_dict(model)))
    model(torch.ones(1, 3)).sum().backward()
    assert not isinstance(seen[0]["kept"], DTensor)
    assert isinstance(seen[0]["first.weight"], DTensor)
    assert model.first.weight.grad is not None


def test_torch_s_own_function_is_refused_on_another_thread(mesh: DeviceMesh) -> None:
    model = tied(mesh)
    replicate_across_groups(Averages(), model)  # type: ignore[arg-type]
    error = on_another_thread(model.state_dict)
    assert isinstance(error, RequestRefused)
    assert "sharded_state_dict" in str(error)
    assert model.state_dict()
    assert on_another_thread(lambda: sharded_state_dict(model))


def test_every_sharded_part_is_averaged_once(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model, plain = tied(mesh), Tied()
    plain.load_state_dict(
        OrderedDict(
            (key, value.full_tensor() if isinstance(value, DTensor) else value)
            for key, value in sharded_state_dict(model).items()
        )
    )
    averages = Averages()
    replicate_across_groups(averages, model)  # type: ignore[arg-type]
    for each in (model, plain):
        each(torch.ones(2, 3)).sum().backward()
    assert averages.num_calls == 2
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        torch.testing.assert_close(parameter.grad.to_local(), 2 * gradients[name])


def test_parameters_of_one_module_on_several_meshes_are_all_averaged(mesh: DeviceMesh) -> None:
    parts = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(parts, "ShardPlacementResult"):
        pytest.skip("this torch shards a module over one mesh only")
    other = DeviceMesh.from_group(dist.new_group([0]), "cpu", mesh_dim_names=("other",))
    places = {
        2: parts.ShardPlacementResult(Shard(0), parts.FSDPMeshInfo(mesh, 0)),
        1: parts.ShardPlacementResult(Shard(0), parts.FSDPMeshInfo(other, 0)),
    }
    model, averages = nn.Linear(2, 2), Averages()
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda parameter: places[parameter.ndim])
    replicate_across_groups(averages, model)  # type: ignore[arg-type]
    model(torch.ones(1, 2)).sum().backward()
    assert averages.num_calls == 2
    for parameter in model.parameters():
        assert isinstance(parameter.grad, DTensor)
        assert torch.equal(parameter.grad.to_local(), torch.full(parameter.shape, 2.0))
    assert list(sharded_state_dict(model)) == list(model.state_dict())


def test_accumulated_gradients_are_averaged_at_their_end(mesh: DeviceMesh) -> None:
    model, averages = tied(mesh), Averages()
    replicate_across_groups(averages, model)  # type: ignore[arg-type]
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 3)).sum().backward()
    assert averages.num_calls == 0
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 3)).sum().backward()
    assert averages.num_calls == 2


def test_a_model_that_is_not_sharded_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(ConfigError, match="call fully_shard first"):
        replicate_across_groups(Averages(), nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_parameter_outside_is_named(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0], mesh=mesh)
    with pytest.raises(ConfigError, match=r"1\.weight='outside of FSDP'"):
        replicate_across_groups(Averages(), model)  # type: ignore[arg-type]


def sent(state: Any) -> Any:
    """The state after its way through the HTTP transport's description and bytes."""
    described = describe(state)
    memory = described.memory.copy(0, described.memory.size)
    return parse(described.description, "a").rebuild(memory, "a")


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial("sum")])
def test_a_sharded_tensor_survives_the_way(mesh: DeviceMesh, placement: Any) -> None:
    local = torch.arange(6.0).reshape(2, 3)
    tensor = DTensor.from_local(local, mesh, [placement], run_check=False)
    state = {"a": [tensor, (1, tensor)], "b": OrderedDict(c=torch.ones(1)), "d": None}
    back = put_together(sent(take_apart(state)), lambda: state, "a")
    for got in (back["a"][0], back["a"][1][1]):
        assert isinstance(got, DTensor)
        assert (got.placements, got.shape, got.stride()) == (
            tensor.placements,
            tensor.shape,
            tensor.stride(),
        )
        assert got.device_mesh is mesh
        assert torch.equal(got.to_local(), local)
    assert back["b"] == OrderedDict(c=torch.ones(1))
    assert back["d"] is None


def test_a_sharded_tensor_is_received_in_place(mesh: DeviceMesh) -> None:
    groups: list[ProcessGroup] = [ProcessGroupGloo(TIMEOUT) for _ in range(2)]
    MeetingPlace().configure(*groups)
    theirs = {"w": distribute_tensor(torch.randn(3, 2), mesh, [Shard(0)])}
    mine = {"w": distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)])}
    PGTransport(groups[0], TIMEOUT).send_checkpoint([1], 1, take_apart(theirs), TIMEOUT)
    receiver = PGTransport(groups[1], TIMEOUT, state_dict=lambda: mine)
    received = put_together(receiver.recv_checkpoint(0, "", 1, TIMEOUT), lambda: mine, "a")
    assert received["w"].to_local().data_ptr() == mine["w"].to_local().data_ptr()
    assert torch.equal(mine["w"].to_local(), theirs["w"].to_local())
    for group in groups:
        group.shutdown()


def test_a_mesh_that_is_not_here_is_named(mesh: DeviceMesh) -> None:
    state = {"w": distribute_tensor(torch.ones(2), mesh, [Shard(0)])}
    other = init_device_mesh("cpu", (1,), mesh_dim_names=("other",))
    own = {"w": distribute_tensor(torch.ones(2), other, [Shard(0)])}
    with pytest.raises(CheckpointError, match=r"'shard'.*here there is.*'other'.*equal meshes"):
        put_together(take_apart(state), lambda: own, "group a")


def test_a_malformed_part_is_an_error_of_the_source(mesh: DeviceMesh) -> None:
    state = take_apart({"w": distribute_tensor(torch.ones(2), mesh, [Shard(0)])})
    state["w"]["torchft.dtensor"]["placements"] = [["nowhere", 1]]
    with pytest.raises(CheckpointError, match=r"group a.*malformed"):
        put_together(state, dict, "group a")


def test_without_shards_nothing_is_asked() -> None:
    state = {"w": torch.ones(2)}

    def own_state() -> Any:
        raise AssertionError("asked for nothing")

    assert put_together(state, own_state, "a")["w"] is state["w"]


def pieces(**saved: Any) -> tuple[StateRegistry, dict[str, Any]]:
    """A registry of these pieces, and what was loaded into them."""
    registry, loaded = StateRegistry(), {}
    for key, state in saved.items():
        registry.register(key, functools.partial(loaded.__setitem__, key), lambda s=state: s)
    return registry, loaded


def test_a_mesh_may_be_found_in_another_piece(mesh: DeviceMesh) -> None:
    moment = distribute_tensor(torch.randn(3), mesh, [Shard(0)])
    weight = distribute_tensor(torch.randn(3), mesh, [Shard(0)])
    healthy, _ = pieces(model={"w": weight}, optim={"state": {0: {"exp_avg": moment}}})
    joiner, loaded = pieces(model={"w": weight.clone()}, optim={"state": {}})
    joiner.load(sent(healthy.collect({}, 1.0)))
    got = loaded["optim"]["state"][0]["exp_avg"]
    assert got.device_mesh is mesh
    assert torch.equal(got.to_local(), moment.to_local())


def test_i6_no_piece_is_loaded_if_the_mesh_of_one_is_not_here(mesh: DeviceMesh) -> None:
    weight = distribute_tensor(torch.randn(3), mesh, [Shard(0)])
    healthy, _ = pieces(first={"n": 1}, second={"w": weight})
    joiner, loaded = pieces(first={"n": 2}, second={"w": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"'shard'.*registered here there is none") as caught:
        joiner.load(sent(healthy.collect({}, 1.0)))
    assert not isinstance(caught.value, TornState)
    assert loaded == {}


def test_meshes_of_equal_names_and_sizes_are_distinguished_by_their_ranks() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        meshes = [DeviceMesh("cpu", ranks, mesh_dim_names=("x",)) for ranks in ([0, 1], [0, 2])]
        state = {
            str(n): DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
            for n, mesh in enumerate(meshes)
        }
        back = put_together(sent(take_apart(state)), lambda: state, "a")
        assert [back[key].device_mesh for key in "01"] == meshes
        with pytest.raises(CheckpointError, match=r"'0,2'.*'0,1'"):
            put_together(sent(take_apart(state)), lambda: {"0": state["0"]}, "a")
    finally:
        dist.destroy_process_group()


@dataclass
class Held:
    weight: Any


Pair = namedtuple("Pair", "left right")


def test_a_sharded_tensor_survives_the_way_in_any_container(mesh: DeviceMesh) -> None:
    tensor = distribute_tensor(torch.randn(3), mesh, [Shard(0)])
    state = {
        "deque": deque([tensor], maxlen=3),
        "default": defaultdict(dict, a={"b": tensor}),
        "pair": Pair(tensor, 1),
        "held": Held([tensor]),
        "model": nn.BatchNorm1d(2).state_dict(),
    }
    back = put_together(sent(take_apart(state)), lambda: state, "a")
    found = [back["deque"][0], back["default"]["a"]["b"], back["pair"].left, back["held"].weight[0]]
    for got in found:
        assert isinstance(got, DTensor)
        assert torch.equal(got.to_local(), tensor.to_local())
    assert back["deque"].maxlen == 3
    assert back["default"]["new"] == {}
    assert back["model"]._metadata == state["model"]._metadata
    assert state["held"].weight[0] is tensor


class Renames(nn.Module):
    """A module with hooks of both kinds, and a version."""

    _version = 3

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        fully_shard(self.inner, mesh=mesh)
        self.calls: list[str] = []
        self.register_state_dict_pre_hook(lambda *_: self.calls.append("before"))
        self.register_state_dict_post_hook(rename)


def rename(_: Any, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
    metadata["renamed"] = True
    assert isinstance(state[f"{prefix}inner.weight"], DTensor)
    state[f"{prefix}other"] = state.pop(f"{prefix}inner.weight")


def test_modules_own_hooks_run_and_their_versions_are_kept(mesh: DeviceMesh) -> None:
    model = nn.Sequential(Renames(mesh), checkpoint_wrapper(nn.Linear(2, 2)))
    fully_shard(model[1], mesh=mesh)
    ours = sharded_state_dict(model)
    calls = list(model[0].calls)  # type: ignore[arg-type]
    theirs = model.state_dict()
    assert calls == ["before"]
    assert list(ours) == list(theirs)
    assert "1.weight" in ours
    assert isinstance(ours["1.weight"], DTensor)
    assert ours._metadata == theirs._metadata  # type: ignore[attr-defined]
    assert ours._metadata["0"] == {"version": 3, "renamed": True}  # type: ignore[attr-defined]


class Own(nn.Module):
    """A module with a ``state_dict`` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(2, 2)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **_: Any) -> Any:
        destination[f"{prefix}mine"] = 1
        return destination


def test_a_state_dict_of_a_module_s_own_is_called_where_it_can_be(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Own())
    fully_shard(model[0], mesh=mesh)
    assert list(sharded_state_dict(model)) == ["0.weight", "0.bias", "1.mine"]
    fully_shard(model[1].part, mesh=mesh)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"1\.Own.*its own state_dict\(\) cannot be called"):
        sharded_state_dict(model)
