"""Tests wrappers of groups and of a manager, and torch's use of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.meeting_place import MeetingPlace
from support.running import eventually
from support.torch_world import alone_in_torch
from support.training import (
    TIMEOUT,
    Trainer,
    assert_identical,
    in_step,
    lighthouse,
    together,
)
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from torchft_svc.client import DistributedDataParallel as OurDistributedDataParallel
from torchft_svc.client import (
    ErrorSwallowingProcessGroupWrapper,
    ManagedProcessGroup,
    Manager,
    ProcessGroup,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ft_init_device_mesh,
)
from torchft_svc.errors import ConfigError, QuorumFailed, RequestRefused
from torchft_svc.testing import FakeProcessGroupWrapper


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_groups_whose_sums_wait_for_nobody_ask_before_each_step(is_wrapped: bool) -> None:
    def make() -> ProcessGroup:
        group = ProcessGroupDummy()
        return FakeProcessGroupWrapper(group) if is_wrapped else group

    with (
        lighthouse(min_replicas=2) as address,
        Trainer(address, "a", 0, pg=make()) as a,
        Trainer(address, "b", 1, pg=make()) as b,
    ):
        together(lambda: a.steps(4), lambda: b.steps(4))
        for each in (a, b):
            quorum = each.manager._worker.round.quorum
            assert quorum is not None
            assert not quorum.steady


class Compressing(ProcessGroupGloo):
    """A group that keeps of each float what fits 127 levels of the largest one."""

    def allreduce(self, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        for each in tensors:
            level = each.abs().max() / 127
            if each.is_floating_point() and level > 0:
                each.copy_(torch.round(each / level) * level)
        return super().allreduce(tensors, *args, **kwargs)


class Declared(Compressing):
    sums_exactly = False


@pytest.mark.parametrize("kind", [Compressing, Declared])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_group_joins_others_whose_sums_are_compressed(
    kind: type[Compressing], is_wrapped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The gradients are so large that the wish to let it in vanishes among them."""

    def trainer(address: str, name: str, seed: int) -> Trainer:
        group: ProcessGroup = kind(TIMEOUT)
        pg = ErrorSwallowingProcessGroupWrapper(group) if is_wrapped else group
        made = Trainer(address, name, seed, pg=pg)
        made.loss = lambda: 1e15 * Trainer.loss(made)  # type: ignore[method-assign]
        return made

    with lighthouse(min_replicas=2) as address, contextlib.ExitStack() as stack:
        a, b = (stack.enter_context(trainer(address, *who)) for who in (("a", 0), ("b", 1)))
        in_step(3, a, b)
        c = stack.enter_context(trainer(address, "c", 2))

        def lets_in(each: Trainer) -> None:
            eventually(each.manager.num_replicas_waiting)
            each.meets(3)

        together(lambda: lets_in(a), lambda: lets_in(b), lambda: c.meets(3))
        in_step(max(each.manager.current_step() for each in (a, b, c)) + 2, a, b, c)
        assert_identical([a, b, c])
    has_warned = "ProcessGroup.sums_exactly" in caplog.text
    assert has_warned is (kind is Compressing)


@pytest.fixture
def pair() -> Iterator[list[FakeProcessGroupWrapper]]:
    groups = [FakeProcessGroupWrapper(ProcessGroupGloo(TIMEOUT)) for _ in range(2)]
    yield groups
    for group in groups:
        group.shutdown()


def test_a_fault_comes_where_it_was_asked_for(pair: list[FakeProcessGroupWrapper]) -> None:
    place, (a, b) = MeetingPlace(), pair
    a.report_configure_error(QuorumFailed("asked for"))
    with pytest.raises(QuorumFailed, match="asked for"):
        a.configure(place.place(1), "a", 0, 1)
    place.configure(a, b)
    a.report_launch_error(RuntimeError("not begun"))
    with pytest.raises(RuntimeError, match="not begun"):
        a.allreduce([torch.ones(1)])
    a.report_future_error(RuntimeError("not ended"))
    works = [group.allreduce([torch.ones(1)]) for group in (a, b)]
    with pytest.raises(RuntimeError, match="not ended"):
        works[0].wait(timeout=TIMEOUT)
    assert works[1].wait()
    a.report_future_error(RuntimeError("not ended"))
    futures = [group.allreduce([torch.ones(1)]).get_future() for group in (a, b)]
    with pytest.raises(RuntimeError, match="not ended"):
        futures[0].wait()
    works = [group.allreduce([torch.ones(1)]) for group in (a, b)]
    assert all(work.wait() for work in works)  # each fault comes once


def test_after_an_error_collectives_succeed_and_leave_zeros(
    pair: list[FakeProcessGroupWrapper],
) -> None:
    place, (a, b) = MeetingPlace(), pair
    group = ErrorSwallowingProcessGroupWrapper(a)
    place.configure(group, b)
    a.report_future_error(RuntimeError("a peer died"))
    first = [each.allreduce([torch.ones(1)]) for each in (group, b)]
    assert group.error() is None
    assert all(work.wait() for work in first)
    assert [tensor.item() for tensor in first[0].result()] == [0]
    assert str(group.error()) == "a peer died"
    assert group.errored() is group.error()

    kept, filled = torch.full((2,), 5.0), torch.full((4,), 5.0)
    assert group.allreduce([kept]).wait()  # b takes no part in it
    assert group._allgather_base(filled, kept).get_future().wait() is not None
    sent = torch.full((2,), 5.0)
    assert group.broadcast([sent]).result()[0] is sent
    assert (kept.tolist(), filled.tolist(), sent.tolist()) == ([0.0] * 2, [0.0] * 4, [5.0] * 2)
    group.report_error(RuntimeError("a second one"))
    assert str(group.error()) == "a peer died"

    place.configure(group, b)
    assert group.error() is None
    tensors = [torch.ones(1), torch.ones(1)]
    for work in [group.allreduce([tensors[0]]), b.allreduce([tensors[1]])]:
        work.wait()
    assert [tensor.item() for tensor in tensors] == [2, 2]


def test_a_swallowed_error_of_a_future(pair: list[FakeProcessGroupWrapper]) -> None:
    place, (a, b) = MeetingPlace(), pair
    group = ErrorSwallowingProcessGroupWrapper(a)
    place.configure(group, b)
    a.report_future_error(RuntimeError("a peer died"))
    tensor = torch.ones(1)
    future, other = group.allreduce([tensor]).get_future(), b.allreduce([torch.ones(1)])
    assert future.wait() is not None
    other.wait()
    assert str(group.error()) == "a peer died"


@pytest.fixture
def torch_world() -> Iterator[None]:
    """Torch's own world, of this process alone."""
    with alone_in_torch():
        yield


@pytest.mark.usefixtures("torch_world")
def test_torch_finds_a_registered_group_by_name() -> None:
    group = ProcessGroupGloo(TIMEOUT)
    group.register("across_groups")
    with pytest.raises(ConfigError, match="another backend by this name"):
        group.register("across_groups")
    MeetingPlace().configure(group)
    try:
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=group)
        dist.broadcast(tensor, group_src=0, group=group)
        gathered = torch.zeros(2)
        dist.all_gather_into_tensor(gathered, tensor, group=group)
        assert gathered.tolist() == [1, 1]
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("replicate",))
        assert mesh.get_group("replicate") is group
        assert all_reduce(torch.ones(2), "sum", mesh).tolist() == [1, 1]
        assert all_reduce(torch.ones(2), "sum", group).tolist() == [1, 1]
    finally:
        dist.destroy_process_group(group)
        group.shutdown()


def test_without_torch_s_world_nothing_can_be_registered() -> None:
    with pytest.raises(ConfigError, match="init_process_group first"):
        ProcessGroupGloo(TIMEOUT).register("nowhere")


def manager_of(address: str, name: str) -> Manager:
    return Manager(
        lighthouse_addr=address,
        replica_id=name,
        hostname="127.0.0.1",
        in_process=True,
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=20),
    )


@pytest.mark.usefixtures("torch_world")
def test_a_mesh_with_a_managed_dimension() -> None:
    with lighthouse() as address, manager_of(address, "a") as manager:
        mesh = ft_init_device_mesh(
            device_type="cpu",
            mesh_shape=(7, 1),
            mesh_dim_names=("replicate", "shard"),
            replicate_dim=0,
            manager=manager,
        )
        assert mesh.mesh_dim_names == ("replicate", "shard")
        group = mesh.get_group("replicate")
        assert isinstance(group, ManagedProcessGroup)
        manager.start_quorum()
        assert group.size() == 1
        tensor = torch.ones(1)
        dist.all_reduce(tensor, ReduceOp.AVG, group=mesh.get_group("replicate"))
        assert mesh["shard"].size() == 1
        assert manager.should_commit()
        alone = {"device_type": "cpu", "mesh_shape": (3,), "manager": manager}
        names = {"mesh_dim_names": ("replicate",)}
        assert ft_init_device_mesh(**alone, **names, replicate_dim=0).size() == 1
        with pytest.raises(ConfigError, match=r"replicate_dim=1 cannot work: use 0 to 0"):
            ft_init_device_mesh(**alone, **names, replicate_dim=1)
        with pytest.raises(ConfigError, match="there are 1 dimensions"):
            ft_init_device_mesh(**alone, mesh_dim_names=("a", "b"), replicate_dim=0)


@pytest.mark.skipif(torch.__version__.startswith("2.7."), reason="its HSDP cannot work on CPUs")
@pytest.mark.usefixtures("torch_world")
def test_fsdp_over_a_managed_dimension_averages_over_the_groups() -> None:
    with lighthouse(min_replicas=2) as address:
        managers = [manager_of(address, name) for name in ("a", "b")]
        nets = [nn.Linear(2, 1, bias=False) for _ in managers]
        for manager, net in zip(managers, nets, strict=True):
            mesh = ft_init_device_mesh(
                device_type="cpu",
                mesh_shape=(2, 1),
                mesh_dim_names=("replicate", "shard"),
                replicate_dim=0,
                manager=manager,
            )
            fully_shard(net, mesh=mesh)

        def gradient(index: int, values: tuple[float, float]) -> list[float]:
            manager, net = managers[index], nets[index]
            manager.start_quorum()
            for number, value in enumerate(values):  # the first is kept back, the second sums up
                net.set_requires_all_reduce(number == 1)  # type: ignore[operator]
                net(torch.full((1, 2), value)).sum().backward()
            assert manager.should_commit()
            found: Any = net.weight.grad
            return found.to_local().flatten().tolist()

        try:
            found = together(lambda: gradient(0, (1.0, 2.0)), lambda: gradient(1, (3.0, 4.0)))
        finally:
            for manager in managers:
                manager.shutdown()
    assert found == [[5.0, 5.0]] * 2


def test_a_manager_in_the_shape_of_a_group() -> None:
    with lighthouse(min_replicas=2) as address:
        managers = [manager_of(address, name) for name in ("a", "b")]

        def use(manager: Manager, value: float) -> Any:
            group = ManagedProcessGroup(manager)
            manager.start_quorum()
            assert (group.size(), group.rank()) == (2, manager.participating_rank())
            average, total = torch.tensor([float(value)]), torch.tensor([float(value)])
            options = dist.AllreduceOptions()
            options.reduceOp = ReduceOp.AVG  # type: ignore[assignment]
            group.allreduce([average], options).wait()
            assert group.allreduce([total]).get_future().wait()
            group.barrier().wait()
            with pytest.raises(ConfigError, match="support reductions only"):
                group.broadcast([average])
            with pytest.raises(RequestRefused, match="from its manager"):
                group.configure("x", "y", 0, 1)
            assert group.errored() is None
            assert manager.should_commit()
            return average.item(), total.item()

        try:
            found = together(lambda: use(managers[0], 1), lambda: use(managers[1], 5))
            assert found == [(3, 6), (3, 6)]
        finally:
            for manager in managers:
                manager.shutdown()


@pytest.mark.usefixtures("torch_world")
def test_torch_s_own_data_parallel_works_over_it() -> None:
    with lighthouse(min_replicas=2) as address:
        managers = [manager_of(address, name) for name in ("c", "d")]

        def train(manager: Manager, value: float) -> list[float]:
            net = nn.Linear(2, 1, bias=False)
            nn.init.ones_(net.weight)
            group = ManagedProcessGroup(manager, averages_sums=True)
            with pytest.raises(ConfigError, match="DistributedDataParallel needs init_sync=False"):
                DistributedDataParallel(net, process_group=group)
            ddp = DistributedDataParallel(
                net,
                process_group=group,
                init_sync=False,
                broadcast_buffers=False,
                find_unused_parameters=True,
            )
            sgd = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(3):
                manager.start_quorum()
                sgd.zero_grad()
                ddp(torch.full((1, 2), float(value))).sum().backward()
                assert manager.should_commit()
                sgd.step()
            return net.weight.flatten().tolist()

        try:
            found = together(lambda: train(managers[0], 1), lambda: train(managers[1], 3))
        finally:
            for manager in managers:
                manager.shutdown()
    # The average of the gradients is 2: three steps of 0.1 take away 0.6.
    assert found == [pytest.approx([0.4, 0.4])] * 2


@pytest.mark.usefixtures("torch_world")
@pytest.mark.parametrize("mistake", ["no backward pass", "one that is ended"])
def test_a_step_of_torch_s_own_data_parallel_without_its_sums_is_discarded(mistake: str) -> None:
    with lighthouse(min_replicas=2) as address:
        managers = [manager_of(address, name) for name in ("e", "f")]

        def train(manager: Manager, wrong: bool) -> list[bool]:
            net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
            ddp = DistributedDataParallel(
                net,
                process_group=ManagedProcessGroup(manager, averages_sums=True),
                init_sync=False,
                broadcast_buffers=False,
                find_unused_parameters=True,
            )

            def step(wrong: bool) -> bool:
                manager.start_quorum()
                loss = ddp(torch.ones(1, 2)).sum()
                if not wrong:
                    loss.backward()
                elif mistake == "one that is ended":
                    handle = net[0].weight.register_hook(lambda _: 1 / 0)
                    with pytest.raises(ZeroDivisionError):
                        loss.backward()
                    handle.remove()
                return manager.should_commit()

            outcomes = [step(False), step(wrong)]
            if mistake == "one that is ended":
                return outcomes  # torch's wrapper cannot be used after it
            return [*outcomes, step(False)]

        try:
            found = together(lambda: train(managers[0], True), lambda: train(managers[1], False))
        finally:
            for manager in managers:
                manager.shutdown()
    assert found == [[True, False, True][: len(found[0])]] * 2


@pytest.mark.usefixtures("torch_world")
def test_torch_s_data_parallel_and_ours_around_one_model_are_refused() -> None:
    with lighthouse() as address, manager_of(address, "a") as manager:
        torch_s = DistributedDataParallel(nn.Linear(2, 1))
        for nested in (torch_s, nn.Sequential(torch_s)):
            with pytest.raises(ConfigError, match="each would overwrite the other's averages"):
                OurDistributedDataParallel(manager, nested)
        ours = OurDistributedDataParallel(manager, nn.Linear(2, 1))
        with pytest.raises(ConfigError, match="each would overwrite the other's averages"):
            DistributedDataParallel(ours)
        outer = DistributedDataParallel(nn.Sequential(ours))  # which torch does not show
        with pytest.raises(ConfigError, match="each would overwrite the other's averages"):
            outer(torch.ones(1, 2))
        with pytest.raises(ConfigError, match="by this wrapper already"):
            OurDistributedDataParallel(manager, nn.Sequential(ours))


@pytest.mark.usefixtures("torch_world")
@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
def test_averages_that_torch_s_data_parallel_overwrites_are_noticed(views: bool) -> None:
    """Side by side around one model, which neither of the two can see."""
    with lighthouse() as address, manager_of(address, "a") as manager:
        net = nn.Linear(2, 1)
        ours = OurDistributedDataParallel(manager, net, gradient_as_bucket_view=views)
        torch_s = DistributedDataParallel(net)
        manager.start_quorum()
        torch_s(torch.ones(1, 2)).sum().backward()
        assert not manager.should_commit()
        assert "overwritten in the same backward pass" in str(manager.errored())
        del torch_s
        manager.start_quorum()
        net.zero_grad()
        ours(torch.ones(1, 2)).sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        net.weight.grad = net.weight.grad.clone()  # type: ignore[union-attr]
        assert manager.should_commit()


@pytest.mark.usefixtures("torch_world")
def test_tensor_parallel_parameters_are_refused() -> None:
    mesh = init_device_mesh("cpu", (1,))
    with lighthouse() as address, manager_of(address, "a") as manager:
        net = parallelize_module(nn.Sequential(nn.Linear(2, 2)), mesh, {"0": ColwiseParallel()})
        with pytest.raises(ConfigError, match=r"0\.weight='a DTensor'.*replicate_across_groups"):
            OurDistributedDataParallel(manager, net)
        sharded = fully_shard(nn.Linear(2, 2), mesh=mesh)
        with pytest.raises(ConfigError, match=r"weight='a DTensor'.*replicate_across_groups"):
            OurDistributedDataParallel(manager, sharded)
        wrapped = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
        with pytest.raises(ConfigError, match="by this wrapper already"):
            OurDistributedDataParallel(manager, wrapped)
