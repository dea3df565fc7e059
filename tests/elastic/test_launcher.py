"""The launcher from Python: functions and commands, results, errors, events and own strategies."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig as TorchLaunchConfig

from torchft_svc.core.launch.restart import REACTIONS, Reaction, RunEvent
from torchft_svc.elastic.launcher import (
    HardRestartPolicyStrategy,
    LaunchConfig,
    RestartPolicy,
    RestartPolicyStrategy,
    SoftRestartPolicyStrategy,
    elastic_launch,
    launch_agent,
)
from torchft_svc.elastic.policy import MonitoringAgent
from torchft_svc.elastic.runtime import get_worker_info
from torchft_svc.errors import ConfigError, TrainingFailed

both = pytest.mark.parametrize("policy", [RestartPolicy.HARD, RestartPolicy.SOFT])


def config(folder: Path, **changes: Any) -> LaunchConfig:
    """One node, two workers which are forked from this process."""
    settings: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": 2,
        "run_id": "run",
        "rdzv_backend": "lighthouse",
        "max_restarts": 0,
        "monitor_interval": 0.05,
        "start_method": "fork",
        "logs_specs": DefaultLogsSpecs(str(folder), redirects=Std.ALL),
        **changes,
    }
    return LaunchConfig(**settings)


def place(word: str) -> tuple[str, int, int, str]:
    """What a worker is, returned to its launcher."""
    info = get_worker_info()
    assert (info.rank, info.world_size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    print("rank", info.rank, flush=True)
    return word, info.rank, info.world_size, "x" * 1_000_000  # more than a pipe holds


def fail_at_first(folder: str) -> int:
    """Worker 1 fails in its first life."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 0 and os.environ["RANK"] == "1":
        raise ValueError("the first attempt")
    get_worker_info()
    return attempt


def fail(_: str) -> None:
    raise ValueError("it cannot be done")


def end_well_on_sigterm() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    time.sleep(600)


@pytest.mark.processes
def test_workers_that_do_not_answer_and_end_well_have_failed(tmp_path: Path) -> None:
    settings = config(tmp_path, restart_policy=RestartPolicy.SOFT, soft_ready_timeout=2.0)
    with pytest.raises(TrainingFailed, match="after 0 retries: workers did not answer within 2 s"):
        elastic_launch(settings, end_well_on_sigterm)()


@pytest.mark.parametrize(
    "policy", ["soft", RestartPolicy.SOFT_REPLACE, SoftRestartPolicyStrategy()]
)
def test_a_soft_policy_uses_the_lighthouse_unless_a_back_end_is_named(policy: Any) -> None:
    assert LaunchConfig(1, 1, 1, restart_policy=policy).rdzv_backend == "lighthouse"
    named = LaunchConfig(1, 1, 1, rdzv_backend="c10d", restart_policy=policy)
    assert named.rdzv_backend == "c10d"


def test_the_hard_policy_has_the_back_end_of_torch() -> None:
    assert LaunchConfig(1, 1, 1).rdzv_backend == TorchLaunchConfig(1, 1, 1).rdzv_backend


@pytest.mark.processes
def test_a_soft_policy_needs_no_other_setting(tmp_path: Path) -> None:
    settings = LaunchConfig(1, 1, 1, restart_policy=RestartPolicy.SOFT, start_method="fork")
    assert elastic_launch(settings, place)("word")[0][:3] == ("word", 0, 1)


@both
@pytest.mark.processes
def test_functions_return_values_by_rank(policy: RestartPolicy, tmp_path: Path) -> None:
    results = elastic_launch(config(tmp_path, restart_policy=policy), place)("word")
    assert {rank: result[:3] for rank, result in results.items()} == {
        0: ("word", 0, 2),
        1: ("word", 1, 2),
    }
    written = sorted(each.read_text() for each in tmp_path.rglob("attempt_0/*/stdout.log"))
    assert written == ["rank 0\n", "rank 1\n"]


@both
@pytest.mark.processes
def test_a_failure_names_the_worker_and_its_error(policy: RestartPolicy, tmp_path: Path) -> None:
    with pytest.raises(ChildFailedError) as failed:
        launch_agent(config(tmp_path, restart_policy=policy), fail, ["x"])
    rank, failure = failed.value.get_first_failure()
    assert failed.value.name == "fail"
    assert (failure.local_rank, failure.exitcode) == (rank, 1)
    assert failure.message["message"] == "ValueError: it cannot be done"
    assert json.loads(Path(failure.error_file).read_text())["message"] == failure.message


@both
@pytest.mark.processes
def test_a_restart_brings_new_workers(policy: RestartPolicy, tmp_path: Path) -> None:
    settings = config(tmp_path, restart_policy=policy, max_restarts=1)
    assert elastic_launch(settings, fail_at_first)(str(tmp_path)) == {0: 1, 1: 1}
    attempts = sorted(each.name for each in tmp_path.rglob("attempt_*"))
    assert attempts == ["attempt_0", "attempt_1"]


@both
@pytest.mark.processes
def test_commands_have_no_values(policy: RestartPolicy, tmp_path: Path) -> None:
    settings = config(tmp_path, restart_policy=policy)
    assert elastic_launch(settings, "sh")("-c", "exit 0") == {0: None, 1: None}
    with pytest.raises(ChildFailedError) as failed:
        elastic_launch(config(tmp_path, restart_policy=policy), "sh")("-c", "exit 9")
    assert failed.value.name == "sh"
    assert failed.value.get_first_failure()[1].exitcode == 9


@pytest.mark.processes
def test_the_agent_records_events_and_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic import events
    from torch.distributed.elastic.agent.server import api

    from torchft_svc.elastic import agent

    recorded: list[Any] = []
    for module in (api, agent, events):
        monkeypatch.setattr(module, "record", lambda event, *_: recorded.append(event))
    metrics: dict[str, int] = {}
    for module in (api, agent):
        monkeypatch.setattr(
            module, "put_metric", lambda name, value, *_: metrics.update({name: value})
        )
    soft = config(tmp_path, restart_policy=RestartPolicy.SOFT, max_restarts=1, role="trainer")
    elastic_launch(soft, fail_at_first)(str(tmp_path))
    workers = [event for event in recorded if event.source.value == "WORKER"]
    states = sorted((event.metadata["state"], event.metadata["global_rank"]) for event in workers)
    assert states == [*[("START", 0)] * 2, *[("START", 1)] * 2, ("SUCCEEDED", 0), ("SUCCEEDED", 1)]
    worlds = [event for event in recorded if event.metadata["state"] == "RENDEZVOUS"]
    assert len(worlds) == 2
    assert all(event.metadata["duration_ms"] >= 0 for event in worlds)
    last = recorded[-1]
    assert (last.source.value, last.metadata["state"]) == ("AGENT", "SUCCEEDED")
    assert (last.metadata["agent_restarts"], last.metadata["rdzv_backend"]) == (1, "lighthouse")
    assert metrics["workers.trainer.remaining_restarts"] == 0
    assert metrics["workers.trainer.run_success_with_retries"] == 1


@pytest.mark.processes
def test_an_own_strategy_may_change_the_table(tmp_path: Path) -> None:
    class OneLife(SoftRestartPolicyStrategy):
        """A node whose worker fails leaves, however many restarts are left."""

        def reactions(self) -> Mapping[RunEvent, tuple[Reaction, ...]]:
            leave = REACTIONS[RestartPolicy.SOFT_NO_REPLACE][RunEvent.WORKER_FAILURE]
            return {**super().reactions(), RunEvent.WORKER_FAILURE: leave}

    settings = config(tmp_path, restart_policy=OneLife(), max_restarts=5)
    with pytest.raises(ChildFailedError):
        elastic_launch(settings, fail_at_first)(str(tmp_path))


@pytest.mark.processes
def test_an_own_strategy_may_be_around_another(tmp_path: Path) -> None:
    class Counting(RestartPolicyStrategy):
        """Notes how the workers ended."""

        def __init__(self) -> None:
            self.results: list[RunResult] = []

        def run(self, agent: MonitoringAgent) -> RunResult:
            self.results.append(HardRestartPolicyStrategy().run(agent))
            return self.results[-1]

    counting = Counting()
    elastic_launch(config(tmp_path, restart_policy=counting), place)("word")
    assert [result.state.value for result in counting.results] == ["SUCCEEDED"]


@both
def test_too_few_nodes_raise_a_rendezvous_error(policy: RestartPolicy, tmp_path: Path) -> None:
    from torchft_svc.coordination import LighthouseServer

    with LighthouseServer("127.0.0.1:0", 1) as lighthouse:
        settings = config(
            tmp_path,
            restart_policy=policy,
            min_nodes=2,
            max_nodes=2,
            rdzv_endpoint=lighthouse.address().removeprefix("http://"),
            rdzv_configs={"join_timeout": 0.2},
        )
        with pytest.raises(RendezvousError):
            elastic_launch(settings, sys.executable)("-c", "0")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"restart_policy": "medium"}, "restart_policy='medium' cannot work: use one of hard"),
        ({"min_nodes": 2}, "nnodes='2:1' cannot work"),
        ({"soft_ready_timeout": -1.0}, "soft_ready_timeout=-1.0 cannot work"),
        ({"exit_barrier_timeout": float("nan")}, "exit_barrier_timeout=nan cannot work"),
        ({"failure_window": 0.0}, "failure_window=0.0 cannot work: use more than 0"),
        ({"max_node_failures": -1}, "max_node_failures=-1 cannot work"),
        ({"max_run_failures": 1, "rdzv_backend": "c10d"}, "only a lighthouse counts the failures"),
        ({"exit_barrier": "some"}, "exit_barrier='some' cannot work: use alive or all"),
        ({"max_soft_failures": -1}, "max_soft_failures=-1 cannot work"),
    ],
)
def test_values_that_cannot_work(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config(tmp_path, **changes)


def test_policies_have_names() -> None:
    assert LaunchConfig(1, 1, 1, restart_policy="soft").restart_policy is RestartPolicy.SOFT  # type: ignore[arg-type]


def test_nothing_to_launch(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a function or a command"):
        launch_agent(config(tmp_path), None, [])
