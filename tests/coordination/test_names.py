"""Tests that names and arguments are those of the public release's torchft.coordination."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
from dataclasses import fields

import pytest

from torchft_svc import coordination

PEER = os.environ.get("TORCHFT_PEER_PYTHON", "")
# What the public release's compiled classes say of themselves.
SCRIPT = """
import inspect, json, sys
sys.stdout.flush()
import torchft.coordination as peer
from torchft._torchft import QuorumResult
found = {}
for name in peer.__all__:
    cls = getattr(peer, name)
    methods = {}
    for method in dir(cls):
        if not method.startswith("__") and callable(getattr(cls, method)):
            methods[method] = list(inspect.signature(getattr(cls, method)).parameters)
    attributes = [n for n in dir(cls) if not n.startswith("_") and n not in methods]
    try:
        init = list(inspect.signature(cls).parameters)
    except ValueError:
        init = None
    found[name] = {"init": init, "methods": methods, "attributes": attributes}
found["QuorumResult"] = {
    "init": None, "methods": {},
    "attributes": [n for n in dir(QuorumResult) if not n.startswith("_")],
}
print(json.dumps(found))
"""
# Its stub and its class disagree on the order of these: everybody names them.
ORDER_DIFFERS = {"_quorum"}
# Of a mechanism that this package does not have.
NOT_OURS = {"reconfigure_handles"}


@pytest.fixture(scope="module")
def peer() -> dict[str, dict[str, object]]:
    if not PEER:
        pytest.skip("TORCHFT_PEER_PYTHON names no python that has the public release")
    result = subprocess.run(
        [PEER, "-W", "ignore", "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if "No module named 'torchft'" in result.stderr:
        pytest.skip("the public release is not installed there")
    assert result.returncode == 0, result.stderr
    found: dict[str, dict[str, object]] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.peer
@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [
        "LighthouseClient",
        "LighthouseServer",
        "ManagerClient",
        "ManagerServer",
        "Quorum",
        "QuorumMember",
        "QuorumResult",
    ],
)
def test_a_class_takes_what_the_public_releases_takes(
    peer: dict[str, dict[str, object]], name: str
) -> None:
    ours, theirs = getattr(coordination, name), peer[name]
    init, methods, attributes = theirs["init"], theirs["methods"], theirs["attributes"]
    assert isinstance(methods, dict)
    assert isinstance(attributes, list)
    if init is not None:
        assert positional(ours.__init__)[1:][: len(init)] == init
    for method, arguments in methods.items():
        taken = positional(getattr(ours, method))
        if method in ORDER_DIFFERS:
            assert set(arguments) <= set(taken), method
            assert set(taken) - set(arguments) <= optional(getattr(ours, method)), method
        else:
            assert [word.lstrip("$") for word in arguments] == taken[: len(arguments)], method
    if attributes and init is None:
        assert set(attributes) - NOT_OURS <= set(dir(ours)) | {field.name for field in fields(ours)}


def positional(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def optional(function: object) -> set[str]:
    """The names that a caller who knows the public release alone may leave out."""
    parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    return {name for name, given in parameters.items() if given.default is not given.empty}


@pytest.mark.parametrize(
    ("cls", "method", "arguments"),
    [
        ("LighthouseServer", "__init__", "bind min_replicas join_timeout_ms quorum_tick_ms"),
        ("ManagerServer", "__init__", "replica_id lighthouse_addr hostname bind store_addr"),
        ("ManagerClient", "__init__", "addr connect_timeout"),
        ("ManagerClient", "_quorum", "group_rank step checkpoint_metadata shrink_only timeout"),
        ("ManagerClient", "_checkpoint_metadata", "rank timeout"),
        ("ManagerClient", "should_commit", "group_rank step should_commit timeout"),
        ("LighthouseClient", "__init__", "addr connect_timeout"),
        ("LighthouseClient", "heartbeat", "replica_id timeout"),
        ("LighthouseClient", "quorum", "replica_id timeout address store_address step world_size"),
    ],
)
def test_the_order_of_arguments_is_fixed(cls: str, method: str, arguments: str) -> None:
    """The same without the public release at hand."""
    found = positional(getattr(getattr(coordination, cls), method))
    assert " ".join(found[1:]).startswith(arguments)
