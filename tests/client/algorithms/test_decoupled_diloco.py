"""Tests of Decoupled DiLoCo: what a merge does to each learner, and learners of different pace."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from support.running import eventually
from support.training import TIMEOUT, bits, lighthouse, make_manager, together
from torch import nn
from torch.utils.data import DataLoader

from torchft_svc.client import Manager, ProcessGroupGloo
from torchft_svc.client.algorithms import DecoupledDiLoCo, DiLoCo, LocalSGD, merging
from torchft_svc.client.algorithms.agreed_weights import AgreedWeights, BucketedAverage
from torchft_svc.client.algorithms.learner_workers import LearnerWorkers
from torchft_svc.client.algorithms.merge_rule import LearnerReport
from torchft_svc.client.algorithms.merging import Delivery, Fragment, launch_average
from torchft_svc.client.data import ElasticDataLoader
from torchft_svc.coordination import LighthouseClient
from torchft_svc.errors import (
    ConfigError,
    Drained,
    GroupDiffers,
    PeerError,
    RequestRefused,
    WorkerLost,
)
from torchft_svc.settings import WorldSizeMode

pytestmark = pytest.mark.timeout(100)


class Learner:
    """One weight of a learner as a `Fragment`, whose outer optimizer subtracts the average."""

    def __init__(self, start: float = 8.0) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.model.weight, start)
        weights = AgreedWeights(self.model, torch.device("cpu"), False)
        average = BucketedAverage(cast("Manager", None), weights.values, None)
        self.fragment = Fragment(weights, plain_sgd, average)
        self.seen = 0

    def learn(self, amount: float, tokens: int = 1) -> None:
        with torch.no_grad():
            self.model.weight -= amount
        self.seen += tokens

    def deliver(self) -> Delivery | None:
        self.fragment.adopt(self.seen)
        self.fragment.deliver(self.seen, now=0.0)
        return self.fragment.delivery

    def merge(self, average: float, contribution: Delivery | None) -> None:
        self.fragment.merge([torch.tensor([[average]])], contribution)

    @property
    def own(self) -> float:
        self.fragment.adopt(self.seen)
        return self.model.weight.item()

    @property
    def merged(self) -> float:
        return self.fragment.weights.values[0].item()


def plain_sgd(weights: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=1.0)


def value(delivery: Delivery | None) -> float:
    assert delivery is not None
    return float(delivery.deltas[0].item())


def test_a_learner_keeps_what_it_learns_after_its_delivery() -> None:
    learner = Learner()
    learner.learn(1.0)
    delivery = learner.deliver()
    assert (value(delivery), delivery.tokens if delivery else 0) == (1.0, 1)
    learner.learn(0.25)
    learner.merge(3.0, delivery)  # the others have learned more
    assert (learner.merged, learner.own) == (5.0, 4.75)
    assert learner.fragment.delivery is None
    learner.learn(0.25)
    assert value(learner.deliver()) == 0.5


def test_a_late_delivery_is_in_the_next_merge() -> None:
    learner = Learner()
    learner.learn(1.0)
    delivery = learner.deliver()
    learner.merge(2.0, None)  # the others', before this learner's thread has seen the delivery
    assert learner.fragment.delivery is delivery
    assert (learner.merged, learner.own) == (6.0, 5.0)
    learner.learn(1.0)
    latest = learner.deliver()
    assert (value(latest), latest.tokens if latest else 0) == (2.0, 2)
    learner.merge(2.0, latest)
    assert (learner.merged, learner.own) == (4.0, 4.0)


def test_a_newer_delivery_than_the_merged_one_is_dropped() -> None:
    learner = Learner()
    learner.learn(1.0)
    merged = learner.deliver()
    learner.learn(0.5)
    learner.deliver()  # while the first one is being averaged
    learner.merge(1.0, merged)
    assert learner.fragment.delivery is None
    assert (learner.merged, learner.own) == (7.0, 6.5)
    assert value(learner.deliver()) == 0.5


def test_two_merges_before_an_inner_step() -> None:
    learner = Learner()
    learner.learn(1.0)
    learner.merge(2.0, learner.deliver())
    learner.merge(3.0, None)
    assert (learner.merged, learner.own) == (3.0, 3.0)


def test_nothing_new_is_not_delivered() -> None:
    learner = Learner()
    assert learner.deliver() is None
    learner.learn(1.0)
    learner.merge(1.0, learner.deliver())
    assert learner.deliver() is None


def test_a_learner_that_was_away_keeps_its_own_work() -> None:
    ahead, behind = Learner(), Learner()
    behind.learn(1.0)
    sent = behind.deliver()
    behind.learn(0.5)
    ahead.merge(3.0, None)
    behind.fragment.heal(ahead.fragment.state_dict(), keeps_progress=True, sent=None)
    assert (behind.merged, behind.own) == (5.0, 3.5)
    # What was in a merge whose result it has not seen counts as merged.
    ahead.merge(1.0, None)
    behind.fragment.heal(ahead.fragment.state_dict(), keeps_progress=True, sent=sent)
    assert (behind.merged, behind.own) == (4.0, 3.5)
    assert value(behind.deliver()) == 0.5


@pytest.mark.parametrize("is_merged", [False, True])
def test_what_was_sent_counts_as_merged_only_if_others_have_merged(
    address: str, *, is_merged: bool
) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with make_manager(address, "a", use_async_quorum=False) as manager:
        merger = make_learner(manager, model, inner)._merger
        fragment = merger.next_fragment
        with torch.no_grad():
            model[0].weight -= 1.0
        fragment.deliver(seen=1, now=0.0)
        merger._is_in_phase = True
        assert fragment.delivery is not None
        merger._sent = fragment, fragment.delivery
        state = merger.save_state()
        merger.load_state({**state, "merges": state["merges"] + is_merged})
        assert (fragment.delivery is None) is is_merged
        assert fragment._seen == is_merged


def test_a_learner_that_joins_begins_with_the_merged_weights() -> None:
    ahead, joiner = Learner(), Learner(start=100.0)
    ahead.merge(3.0, None)
    joiner.learn(1.0, tokens=5)
    sent = joiner.deliver()
    joiner.fragment.heal(ahead.fragment.state_dict(), keeps_progress=False, sent=None)
    assert (joiner.merged, joiner.own) == (5.0, 5.0)
    joiner.merge(1.0, sent)  # of before it began anew: nothing of it is in the weights
    assert (joiner.merged, joiner.own) == (4.0, 4.0)


def test_contributions_count_by_their_tokens(address: str) -> None:
    """Three learners, of which one has not delivered: (1 * 1 + 3 * 5) / 4."""
    learners = [Learner() for _ in range(3)]
    for learner, amount, tokens in zip(learners, (1.0, 5.0), (1, 3), strict=False):
        learner.learn(amount, tokens)
        learner.deliver()
    deliveries = [each.fragment.delivery for each in learners]
    reports = [LearnerReport(float(each.tokens if each else 0), 0.0, 0.0) for each in deliveries]

    def merge(name: str, learner: Learner, delivery: Delivery | None) -> float:
        with make_manager(address, name, use_async_quorum=False, min_replicas=3) as manager:
            manager.register_state_dict_fn("none", lambda _: None, dict)
            fragment = learner.fragment
            fragment.average = BucketedAverage(manager, fragment.weights.values, None)
            manager.start_quorum()
            launch_average(fragment, delivery, reports)
            assert manager.should_commit()
            fragment.merge(fragment.average.pop_averages(), delivery)
        return learner.merged

    merged = together(
        *(
            lambda name=name, each=each, delivery=delivery: merge(name, each, delivery)
            for name, each, delivery in zip("abc", learners, deliveries, strict=True)
        )
    )
    assert merged == [4.0] * 3


class Job:
    """Learners as threads, with real managers and a lighthouse."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []
        self.learners: dict[str, DecoupledDiLoCo] = {}
        self.models: dict[str, nn.Sequential] = {}
        self.firsts: dict[str, list[torch.Tensor]] = {}
        self._ends: dict[str, threading.Event] = {}

    def start(self, name: str, pause_s: float, **options: Any) -> None:
        self._ends[name] = threading.Event()
        thread = threading.Thread(target=self._run, args=(name, pause_s, options), name=name)
        self._threads.append(thread)
        thread.start()

    def end(self, name: str) -> None:
        self._ends[name].set()

    def join(self) -> None:
        for end in self._ends.values():
            end.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        if self.errors:
            raise self.errors[0]

    def _run(self, name: str, pause_s: float, options: dict[str, Any]) -> None:
        try:
            self._train(name, pause_s, options)
        except BaseException as error:
            self.errors.append(error)

    def _train(self, name: str, pause_s: float, options: dict[str, Any]) -> None:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        of_manager = options.pop("manager", {})
        with make_manager(self._address, name, use_async_quorum=False, **of_manager) as manager:
            learner = make_learner(manager, model, inner, **options)
            with learner:
                self.firsts[name] = [each.detach().clone() for each in model.parameters()]
                self.models[name], self.learners[name] = model, learner
                while not self._ends[name].wait(pause_s):
                    for parameter in model.parameters():
                        parameter.grad = torch.full_like(parameter, 1e-3)
                    inner.step()


def make_learner(
    manager: Any, model: nn.Sequential, inner: torch.optim.Optimizer, **options: Any
) -> DecoupledDiLoCo:
    settings: dict[str, Any] = {
        "model_fragments": [model[0], model[1]],
        "outer_optimizer": lambda weights: torch.optim.SGD(
            weights, lr=0.7, momentum=0.9, nesterov=True
        ),
        "sync_every": 8,
    }
    return DecoupledDiLoCo(manager, inner_optimizer=inner, **{**settings, **options})


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse() as address:
        yield address


@pytest.fixture
def job(address: str) -> Iterator[Job]:
    job = Job(address)
    yield job
    job.join()


def awaits(holds: Callable[[], bool]) -> None:
    eventually(holds, 60.0)


def test_learners_of_different_pace(job: Job) -> None:
    """Merges keep the pace of the fast one; each token counts once; merged weights are equal."""
    job.start("fast", 0.01)
    awaits(lambda: "fast" in job.learners and job.learners["fast"].merges >= 2)
    job.start("slow", 0.1)
    awaits(lambda: "slow" in job.learners)
    fast, slow = job.learners["fast"], job.learners["slow"]
    began_at = slow.merges
    awaits(lambda: slow._fragments[0]._seen > 0 and slow._fragments[1]._seen > 0)
    merges, tokens = slow.merges - began_at, slow.tokens
    assert merges > tokens / 4, "a merge for each delivery of the slow one would be as many"
    job.end("slow")  # the fast one goes on alone
    last = slow.merges + 3
    awaits(lambda: fast.merges >= last)
    job.join()
    contributed = [fast._fragments[n]._seen + slow._fragments[n]._seen for n in (0, 1)]
    assert fast._merger.merged_tokens == sum(contributed)
    assert fast._seen == fast.tokens >= max(each._seen for each in fast._fragments)


def test_a_spare_keeps_what_it_learns_until_it_contributes(job: Job) -> None:
    spares = {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES, "min_replica_size": 1}
    for name in ("first", "second"):
        job.start(name, 0.02, manager=spares)
    awaits(lambda: len(job.learners) == 2)
    first, second = job.learners["first"], job.learners["second"]
    last = second.merges + 4
    awaits(lambda: second.merges >= last)
    job.end("second")  # the other one goes on alone
    last = second.merges + 3
    awaits(lambda: first.merges >= last)
    job.join()
    contributed = [first._fragments[n]._seen + second._fragments[n]._seen for n in (0, 1)]
    assert first._merger.merged_tokens == sum(contributed)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"should_quantize": "int8", "error_feedback": True},
        {"should_quantize": "float8"},
    ],
    ids=str,
)
def test_merged_weights_are_equal(job: Job, options: dict[str, Any]) -> None:
    states: dict[str, dict[int, Any]] = {"a": {}, "b": {}}
    for name in states:
        job.start(name, 0.02, **options)
    awaits(lambda: len(job.learners) == len(states))

    def see() -> bool:
        for name, found in states.items():
            state = job.learners[name].state_dict()
            found[state["merges"]] = bits(state)
        return len(states["a"].keys() & states["b"].keys()) >= 4

    awaits(see)
    for merges in states["a"].keys() & states["b"].keys():
        assert states["a"][merges] == states["b"][merges]


def test_a_joiner_begins_with_the_merged_weights(job: Job) -> None:
    job.start("first", 0.1)
    awaits(lambda: "first" in job.learners and job.learners["first"].merges >= 2)
    merged: list[list[torch.Tensor]] = []

    def see() -> bool:
        state = job.learners["first"].state_dict()
        merged.append(
            [each for one in state["fragments"] for each in one["merged_weights"].values()]
        )
        return "second" in job.learners

    job.start("second", 0.02)
    awaits(see)
    begun = job.firsts["second"]
    assert any(all(map(torch.equal, begun, weights)) for weights in merged)
    assert job.learners["second"].merges >= 2


def test_g1_a_learner_that_is_a_prepared_spare_waits_for_a_place(address: str, job: Job) -> None:
    """A prepared spare may wait for longer than ``quorum_timeout`` before it takes a place."""
    limit = timedelta(seconds=3)
    limits = {"timeout": limit, "quorum_timeout": limit}
    for name in ("a", "b"):
        job.start(name, 0.02)
    awaits(lambda: len(job.learners) == 2)
    job.start("spare", 0.02, manager={"spare": True, **limits})
    with contextlib.closing(LighthouseClient(address, TIMEOUT)) as client:
        awaits(lambda: any(each.asks for each in client.status()[0].prepared_spares))
        until = time.monotonic() + 2 * limit.total_seconds()
        awaits(lambda: time.monotonic() > until)
        assert not job.errors
        assert "spare" not in job.learners
        client.drain("b", "its machine is needed")
        awaits(lambda: bool(job.errors))
    assert isinstance(job.errors.pop(), Drained)
    awaits(lambda: "spare" in job.learners)
    first, spare = job.learners["a"], job.learners["spare"]
    last = spare.merges + 3
    awaits(lambda: spare.merges >= last and spare.num_learners == 2)
    assert first.merges > 0


def test_a_checkpoint(address: str, job: Job) -> None:
    job.start("first", 0.01)
    awaits(lambda: "first" in job.learners and job.learners["first"].merges >= 3)
    job.join()
    saved = job.learners["first"].state_dict()
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with make_manager(address, "later", use_async_quorum=False, job_id="later") as manager:
        learner = make_learner(manager, model, inner)
        learner.load_state_dict(saved)
        with learner:
            assert learner.merges == saved["merges"]
            merged = saved["fragments"][1]["merged_weights"]["weight"]
            assert torch.equal(model[1].weight, merged)
            with pytest.raises(RequestRefused, match="before the block"):
                learner.load_state_dict(saved)
    learner.load_merged_weights()
    assert torch.equal(model[1].weight, merged)


def test_settings_that_cannot_work(address: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with make_manager(address, "a", use_async_quorum=False) as manager:
        for options, field in (
            ({"sync_every": 3}, "sync_every"),
            ({"sync_every": 0}, "sync_every"),
            ({"model_fragments": []}, "model_fragments"),
            ({"model_fragments": [model, model[0]]}, "fragment"),
            ({"min_replicas": 0}, "min_replicas"),
            ({"grace": -1.0}, "grace"),
            ({"should_quantize": "int4"}, "should_quantize"),
            ({"error_feedback": True}, "error_feedback"),
            ({"bucket_cap_mb": 0.0}, "bucket_cap_mb"),
            ({"outer_optimizer": inner}, "outer_optimizer='SGD' cannot work: a function is needed"),
            ({"outer_optimizer": lambda _: inner}, "made without some of the weights"),
            ({"outer_optimizer": lambda _: None}, "outer_optimizer='NoneType'"),
        ):
            with pytest.raises(ConfigError, match=field):
                make_learner(manager, model, inner, **cast("Any", options))
        stale = torch.optim.SGD(nn.Linear(2, 3).parameters(), lr=1.0)
        with pytest.raises(ConfigError, match=r"inner_optimizer='SGD' .*: it trains none"):
            make_learner(manager, model, stale)
        learner = make_learner(manager, model, inner)
        with pytest.raises(ConfigError, match="count"):
            learner.add_tokens(-1)
        with pytest.raises(ConfigError, match="another algorithm"):
            LocalSGD(manager, model, inner, 4)
    with make_manager(address, "b") as manager, pytest.raises(ConfigError, match="async_quorum"):
        make_learner(manager, model, inner)
    states = {"state_dict": model.state_dict, "load_state_dict": model.load_state_dict}
    with (
        make_manager(address, "c", use_async_quorum=False, **states) as manager,
        pytest.raises(ConfigError, match="it returns the model"),
    ):
        make_learner(manager, model, inner)


@pytest.mark.parametrize("steps", [False, True])
def test_a_program_that_steps_another_optimizer_is_warned(
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    steps: bool,
) -> None:
    """The learner delivers nothing, and a loop over the merges would never end."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with make_manager(address, "a", use_async_quorum=False) as manager:
        learner = make_learner(manager, model, inner)
        with learner:
            if steps:
                inner.step()
            monkeypatch.setattr(merging, "_FIRST_STEP_S", 0.0)
            step = manager.current_step()
            eventually(lambda: manager.current_step() > step + 3)
    assert caplog.text.count("no inner step") == (not steps)


def test_workers_without_a_world_are_refused() -> None:
    """Several workers that nothing connects would deliver and adopt at different inner steps."""
    with pytest.raises(ConfigError, match=r"not initialized.*init_process_group in all 2 of them"):
        LearnerWorkers(2, timedelta(seconds=1))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="a world of 1"):
            LearnerWorkers(2, timedelta(seconds=1))
    finally:
        dist.destroy_process_group()


def gloo_groups(
    size: int, limit: timedelta, kind: type[dist.ProcessGroupGloo] = dist.ProcessGroupGloo
) -> list[dist.ProcessGroupGloo]:
    store = dist.HashStore()
    return together(*(lambda rank=rank: kind(store, rank, size, limit) for rank in range(size)))


def exchanging_by(group: dist.ProcessGroupGloo, limit: timedelta) -> LearnerWorkers:
    workers = LearnerWorkers(1, limit)
    workers.are_several, workers._groups = True, (group, group)
    return workers


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_worker_that_is_lost_or_frozen_is_named_as_that(is_gone: bool) -> None:
    """The peers end with a sentence about their group; gloo names an address only."""
    limit = timedelta(seconds=0.5)
    groups = gloo_groups(2, limit)
    workers = exchanging_by(groups[0], limit)
    if is_gone:
        groups.pop().abort()
    for _ in range(2):
        with pytest.raises(WorkerLost, match=r"worker of this group has ended, or .* 0\.5 s"):
            workers.gather_in_merger([1.0])


class Miscounting(dist.ProcessGroupGloo):
    """Calls itself larger than it is, so that torch refuses what is gathered."""

    def size(self) -> int:
        return super().size() + 1


def test_an_exchange_that_torch_refuses_is_no_lost_worker() -> None:
    limit = timedelta(seconds=0.5)
    (group,) = gloo_groups(1, limit, Miscounting)
    with pytest.raises(RuntimeError, match="invalid output tensor list"):
        exchanging_by(group, limit).gather_in_merger([1.0])


@pytest.mark.parametrize(
    ("options", "words"),
    [({"grace": 2.0}, "grace 2"), ({"should_quantize": True}, "quantized int8")],
)
def test_learners_that_differ_are_refused(job: Job, options: dict[str, Any], words: str) -> None:
    job.start("first", 0.02)
    awaits(lambda: "first" in job.learners and job.learners["first"].merges >= 1)
    job.start("second", 0.02, **options)
    awaits(lambda: bool(job.errors))
    (error,) = job.errors
    job.errors.clear()
    assert isinstance(error, GroupDiffers)
    assert words in str(error)


@pytest.mark.parametrize("kind", ["local_sgd", "diloco", "decoupled"])
def test_a_loader_that_begins_steps_is_refused(address: str, kind: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    torchs = DataLoader(cast("Any", list(range(8))))
    with make_manager(address, "a", use_async_quorum=False) as manager:
        algorithm: Any = {
            "local_sgd": lambda: LocalSGD(manager, model, inner, 4),
            "diloco": lambda: DiLoCo(manager, [model], inner, inner, 4),
            "decoupled": lambda: make_learner(manager, model, inner),
        }[kind]()
        ElasticDataLoader(manager, torchs, global_batch_size=4)
        with pytest.raises(ConfigError, match=r"beside the loader.*read with torch's"), algorithm:
            pass


class DeviceGloo(ProcessGroupGloo):
    """Gloo that sums nothing on CPUs, as a group for devices only; ``is_known``: it declares it."""

    def __init__(self, *, is_known: bool) -> None:
        super().__init__()
        self._is_known = is_known

    def reduces_on(self, device: torch.device) -> bool:
        return not self._is_known or device.type != "cpu"

    def _launch(self, name: str, args: Any, kwargs: Any) -> Any:
        raise RuntimeError("No backend type associated with device type cpu")


def test_a_process_group_that_sums_only_on_devices_is_refused(address: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"use_async_quorum": False, "pg": DeviceGloo(is_known=True)}
    with (
        make_manager(address, "a", **options) as manager,
        pytest.raises(ConfigError, match=r"pg='DeviceGloo'.*give the manager ProcessGroupGloo"),
    ):
        make_learner(manager, model, inner)


def test_the_deadline_names_what_has_failed(job: Job) -> None:
    """Somebody's own process group may not declare where it sums."""
    limit = timedelta(seconds=3)
    pg = DeviceGloo(is_known=False)
    job.start("a", 0.02, manager={"pg": pg, "timeout": limit, "quorum_timeout": limit})
    awaits(lambda: bool(job.errors))
    (error,) = job.errors
    job.errors.clear()
    assert "No backend type associated with device type cpu" in str(error)


def test_an_error_of_the_merger_is_raised_in_the_next_inner_step(job: Job) -> None:
    """Training with weights that are not merged any more would be in vain."""
    job.start("only", 0.02)
    awaits(lambda: "only" in job.learners and job.learners["only"].merges >= 1)

    def fail(*_: Any) -> None:
        raise ValueError("an outer optimizer that fails")

    job.learners["only"]._fragments[0].outer.step = fail  # type: ignore[assignment]
    job.learners["only"]._fragments[1].outer.step = fail  # type: ignore[assignment]
    awaits(lambda: bool(job.errors))
    assert "an outer optimizer that fails" in str(job.errors.pop())


def test_no_lighthouse_in_time(address: str) -> None:
    """The block is not entered without the merged weights; no wait is without a limit."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    limit = timedelta(seconds=1)
    with make_manager(
        address, "a", use_async_quorum=False, min_replicas=2, quorum_timeout=limit, timeout=limit
    ) as manager:
        learner = make_learner(manager, model, inner)
        began_at = time.monotonic()
        with pytest.raises(PeerError), learner:
            pass
        assert time.monotonic() - began_at < 20
        with pytest.raises(ConfigError, match="it is used once"), learner:
            pass
