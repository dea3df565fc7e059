"""The TorchX component, loaded and dry-run by TorchX itself."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchx")

from torchx.runner import get_runner

from torchft_svc.errors import ConfigError

COMPONENT = f"{Path(__file__).parents[1] / 'torchft_svc' / 'torchx.py'}:hsdp"


def test_it_starts_a_launcher_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "lighthouse:29510")
    arguments = ["--replicas", "3", "--workers_per_replica", "2", "--max_restarts", "4"]
    arguments += ["--script", "train.py", "--env", "LR=0.1", "--", "--steps", "7"]
    with get_runner() as runner:
        dryrun = runner.dryrun_component(COMPONENT, arguments, "local_cwd", {"log_dir": "logs"})
        roles = dryrun._app.roles
        assert str(dryrun).count("torchft-run") == 3
    assert [role.name for role in roles] == ["replica_0", "replica_1", "replica_2"]
    assert [role.env["REPLICA_GROUP_ID"] for role in roles] == ["0", "1", "2"]
    assert len({role.args[0] for role in roles}) == 3, "each group has a port of its own"
    for role in roles:
        assert role.entrypoint == "torchft-run"
        assert role.num_replicas == 1
        expected = ["--nnodes=1", "--nproc_per_node=2", "--max_restarts=4", "train.py"]
        assert role.args[1:] == [*expected, "--steps", "7"]
        assert role.env["NUM_REPLICA_GROUPS"] == "3"
        assert role.env["TORCHFT_LIGHTHOUSE"] == "lighthouse:29510"
        assert role.env["LR"] == "0.1"


def test_its_arguments_are_checked() -> None:
    from torchft_svc.torchx import hsdp

    with pytest.raises(ConfigError, match="replicas=0"):
        hsdp(replicas=0)
    assert [role.args[-1] for role in hsdp("a", script="").roles] == ["a", "a"]
