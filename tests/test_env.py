"""Tests the environment: types, aliases, and errors that name the variable and its value."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import torchft_svc
from torchft_svc.env import Environment
from torchft_svc.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "name", "text", "value"),
    [
        ("lighthouse_address", "TORCHFT_LIGHTHOUSE", "a:1", "a:1"),
        ("lighthouse_address", "TORCH_LIGHTHOUSE", "b:2", "b:2"),
        ("manager_address", "TORCHFT_MANAGER_ADDR", "c:3", "c:3"),
        ("manager_port", "TORCHFT_MANAGER_PORT", "0", 0),
        ("master_address", "MASTER_ADDR", "host", "host"),
        ("master_port", "MASTER_PORT", "29500", 29500),
        ("group_rank", "RANK", "0", 0),
        ("group_world_size", "WORLD_SIZE", "8", 8),
        ("timeout_s", "TORCHFT_TIMEOUT_SEC", "1.5", 1.5),
        ("quorum_timeout_s", "TORCHFT_QUORUM_TIMEOUT_SEC", "60", 60.0),
        ("connect_timeout_s", "TORCHFT_CONNECT_TIMEOUT_SEC", "10", 10.0),
        ("watchdog_timeout_s", "TORCHFT_WATCHDOG_TIMEOUT_SEC", "30", 30.0),
        ("flight_recorder", "TORCHFT_FLIGHT_RECORDER", "/records", "/records"),
        ("checks_collectives", "TORCHFT_CHECK_COLLECTIVES", "1", True),
        ("checks_collectives", "TORCH_DISTRIBUTED_DEBUG", "DETAIL", True),
        ("checks_collectives", "TORCH_DISTRIBUTED_DEBUG", "INFO", False),
        ("quorum_retries", "TORCHFT_QUORUM_RETRIES", "3", 3),
        ("is_spare", "TORCHFT_SPARE", "1", True),
        ("spare_refresh_s", "TORCHFT_SPARE_REFRESH_SEC", "0.5", 0.5),
        ("checkpoint_host", "TORCHFT_CHECKPOINT_HOST", "10.0.0.1", "10.0.0.1"),
        ("uses_agent_store", "TORCHELASTIC_USE_AGENT_STORE", "True", True),
        ("uses_agent_store", "TORCHELASTIC_USE_AGENT_STORE", "0", False),
        ("restart_count", "TORCHELASTIC_RESTART_COUNT", "2", 2),
        ("world_round", "TORCHFT_WORLD_ROUND", "3", 3),
        ("worker_channel", "TORCHFT_WORKER_CHANNEL", "/run/0-0", "/run/0-0"),
        ("job_id", "TORCHFT_JOB_ID", "run-7", "run-7"),
        ("min_replicas", "TORCHFT_MIN_REPLICAS", "2", 2),
        ("replica_group_id", "REPLICA_GROUP_ID", "3", "3"),
        ("tls_cert_file", "TORCHFT_TLS_CERT", "/c.pem", "/c.pem"),
        ("tls_key_file", "TORCHFT_TLS_KEY", "/k.pem", "/k.pem"),
        ("tls_ca_file", "TORCHFT_TLS_CA", "/ca.pem", "/ca.pem"),
        ("token", "TORCHFT_TOKEN", "secret", "secret"),
        ("token_file", "TORCHFT_TOKEN_FILE", "/token", "/token"),
        ("etcd_cert_file", "TORCHFT_ETCD_CERT", "/c.pem", "/c.pem"),
        ("etcd_key_file", "TORCHFT_ETCD_KEY", "/k.pem", "/k.pem"),
        ("etcd_ca_file", "TORCHFT_ETCD_CA", "/ca.pem", "/ca.pem"),
        ("etcd_user", "TORCHFT_ETCD_USER", "lighthouse", "lighthouse"),
        ("etcd_password", "TORCHFT_ETCD_PASSWORD", "secret", "secret"),
        ("etcd_password_file", "TORCHFT_ETCD_PASSWORD_FILE", "/password", "/password"),
    ],
)
def test_each_variable(field: str, name: str, text: str, value: object) -> None:
    assert getattr(Environment({name: text}), field) == value
    assert getattr(Environment({name: f"  {text} "}), field) == value


def test_what_is_not_set() -> None:
    empty = Environment({"RANK": "", "TORCHFT_LIGHTHOUSE": "  "})
    assert (empty.group_rank, empty.lighthouse_address, empty.timeout_s) == (None, None, None)
    assert (empty.uses_agent_store, empty.restart_count) == (False, 0)


@pytest.mark.parametrize("name", ["tls_ca_file", "token", "etcd_user", "etcd_password_file"])
def test_what_protects_is_not_taken_for_unset_when_it_is_empty(name: str) -> None:
    variable = f"TORCHFT_{name.removesuffix('_file').upper()}"
    variable += "_FILE" if name == "etcd_password_file" else ""
    with pytest.raises(ConfigError, match=f"{variable}=' ' cannot work: it is empty"):
        getattr(Environment({variable: " "}), name)
    assert getattr(Environment({}), name) is None


def test_our_own_name_comes_first() -> None:
    both = Environment({"TORCH_LIGHTHOUSE": "theirs:1", "TORCHFT_LIGHTHOUSE": "ours:1"})
    assert both.lighthouse_address == "ours:1"


@pytest.mark.parametrize(
    ("field", "name", "text"),
    [
        ("group_rank", "RANK", "first"),
        ("group_rank", "RANK", "-1"),
        ("group_world_size", "WORLD_SIZE", "0"),
        ("master_port", "MASTER_PORT", "65536"),
        ("timeout_s", "TORCHFT_TIMEOUT_SEC", "soon"),
        ("timeout_s", "TORCHFT_TIMEOUT_SEC", "0"),
        ("quorum_timeout_s", "TORCHFT_QUORUM_TIMEOUT_SEC", "nan"),
        ("connect_timeout_s", "TORCHFT_CONNECT_TIMEOUT_SEC", "inf"),
        ("uses_agent_store", "TORCHELASTIC_USE_AGENT_STORE", "maybe"),
    ],
)
def test_bad_values_name_the_variable_and_what_it_holds(field: str, name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        getattr(Environment({name: text}), field)
    assert name in str(caught.value)
    assert repr(text) in str(caught.value)


def test_the_process_environment_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment()
    monkeypatch.setenv("TORCHFT_JOB_ID", "one")
    assert environment.job_id == "one"
    monkeypatch.setenv("TORCHFT_JOB_ID", "two")
    assert environment.job_id == "two"


def test_nobody_else_reads_the_environment() -> None:
    package = Path(torchft_svc.__file__).parent
    readers = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "os.environ" in path.read_text() or "getenv" in path.read_text()
    ]
    assert readers == ["env.py"]


@pytest.mark.processes
def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, torchft_svc; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
    assert "Manager" in dir(torchft_svc)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        torchft_svc.Nonsense  # noqa: B018
