"""Compares the names and arguments of `torchft_svc.compat` with those of the public nightly."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

RECORDED = Path(__file__).parents[1] / "support" / "public_api.json"
# The module of each class and function of the public release.
HOMES = {
    "checkpointing._rwlock": ("RWLock",),
    "checkpointing.http_transport": ("HTTPTransport",),
    "checkpointing.pg_transport": ("PGTransport",),
    "checkpointing.transport": ("CheckpointTransport",),
    "coordination": (
        "LighthouseClient",
        "LighthouseServer",
        "ManagerClient",
        "ManagerServer",
        "Quorum",
        "QuorumMember",
    ),
    "data": ("DistributedSampler",),
    "ddp": ("DistributedDataParallel", "PureDistributedDataParallel"),
    "futures": ("context_timeout", "future_timeout", "future_wait", "stream_timeout"),
    "local_sgd": ("DiLoCo", "LocalSGD", "extract_local_tensor"),
    "manager": (
        "ExceptionWithTraceback",
        "Manager",
        "WorldSizeMode",
        "extract_trailing_digits",
        "get_timeout",
    ),
    "optim": ("OptimizerWrapper",),
    "otel": ("setup_logger",),
    "parameter_server": ("ParameterServer",),
    "process_group": (
        "ErrorSwallowingProcessGroupWrapper",
        "FakeProcessGroupWrapper",
        "ManagedProcessGroup",
        "ProcessGroup",
        "ProcessGroupBaby",
        "ProcessGroupBabyGloo",
        "ProcessGroupBabyNCCL",
        "ProcessGroupBabyXCCL",
        "ProcessGroupDummy",
        "ProcessGroupGloo",
        "ProcessGroupNCCL",
        "ProcessGroupWrapper",
        "ProcessGroupXCCL",
        "ReconfigureOptions",
        "create_store_client",
        "reconfigure_with_store",
    ),
    "utils": ("get_stream_context", "record_event", "synchronize"),
}
# What is left out, and why.
LEFT_OUT = {
    "TeeLogExporter": "OpenTelemetry's own processors copy records to several exporters",
    "TracebackType": "a type of the standard library, which a module imports",
    "main": "an example that a module of the public release runs as a program",
    "shutdown": "exporters end with the manager that has opened them",
    "torchft.collectives": "quantized sums are `Manager.allreduce(should_quantize=True)`",
    "torchft.torchcomms": "it needs a library that no registry has",
    "trigger_nccl_fr_trace_through_pipe": "`flight_recorder` of the native manager writes the "
    "records of every quorum that ended with an error",
}
# Arguments that differ, and why.
DIFFERS = {
    "WorldSizeMode": "an enum, whose signature is Python's",
    "ProcessGroupXCCL": "made by the factory that is registered",
    "ProcessGroupBabyXCCL": "made by the factory that is registered",
}
COLLECTIVES = {
    "allgather",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall_base",
    "barrier",
    "broadcast",
    "recv",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "send",
}


def recorded() -> dict[str, str]:
    found: dict[str, str] = json.loads(RECORDED.read_text())
    return found


def module_of(name: str) -> str:
    return next(module for module, names in HOMES.items() if name in names)


def split_at_commas(text: str) -> list[str]:
    """The arguments in a printed signature."""
    parts, depth, begin = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{<") - (letter in ")]}>" and text[place - 1] != "-")
        if letter == "," and depth == 0:
            parts.append(text[begin:place])
            begin = place + 1
    parts.append(text[begin:])
    return [part.strip() for part in parts if part.strip()]


def arguments(printed: str) -> list[tuple[str, bool]]:
    """Name, and whether there is a default, of each argument in a printed signature."""
    inside = re.fullmatch(r"\((.*)\)( -> .*)?", printed, re.DOTALL)
    assert inside, printed
    parts = split_at_commas(inside.group(1))
    return [(re.split("[:=]", part)[0].strip(), "=" in part) for part in parts]


def own_arguments(found: Any) -> list[tuple[str, bool]]:
    prefixes = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [
        (prefixes.get(each.kind, "") + each.name, each.default is not inspect.Parameter.empty)
        for each in inspect.signature(found).parameters.values()
    ]


@pytest.mark.parametrize("module", HOMES)
def test_all_names_of_a_module_are_there_with_their_arguments(module: str) -> None:
    for name in recorded():
        if name.partition(".")[0] in HOMES[module]:
            check(name)


def test_every_public_name_has_a_module_or_a_reason() -> None:
    tops = {name if name in LEFT_OUT else name.partition(".")[0] for name in recorded()}
    assert tops - LEFT_OUT.keys() == {name for names in HOMES.values() for name in names}


def check(name: str) -> None:
    top, _, method = name.partition(".")
    module = importlib.import_module(f"torchft_svc.compat.{module_of(top)}")
    found = getattr(module, top)
    if method:
        found = getattr(found, method)
    printed = recorded()[name]
    if printed == "?" or name in DIFFERS or method in COLLECTIVES:
        return  # collectives take what torch's own take, see `operations.COLLECTIVES`
    wanted = arguments(printed)
    has_defaults = "=" in printed or not printed.endswith(")")
    if not has_defaults:  # compiled code prints names only
        assert [each for each, _ in own_arguments(found)] == [each for each, _ in wanted]
        return
    # What the native classes have besides may follow, as long as a caller need not give it.
    ours = own_arguments(found)
    if [each for each, _ in ours[-2:]] == ["*args", "**kwargs"]:
        return  # a wrapper's method, which hands on what it gets
    assert [each for each, _ in ours[: len(wanted)]] == [each for each, _ in wanted], name
    pairs = zip(ours, wanted, strict=False)
    assert all(has_default or not had for (_, has_default), (_, had) in pairs), name
    assert all(has_default or each[0] == "*" for each, has_default in ours[len(wanted) :]), name


def test_the_exceptions_are_still_needed() -> None:
    assert LEFT_OUT.keys() <= recorded().keys()
    assert DIFFERS.keys() <= recorded().keys()
    for name in LEFT_OUT:
        homes = [f"torchft_svc.compat.{each}" for each in HOMES]
        assert not any(hasattr(importlib.import_module(home), name) for home in homes), name


def test_all_names_of_the_public_package_are_in_ours() -> None:
    compat = importlib.import_module("torchft_svc.compat")
    public = {
        "DistributedDataParallel",
        "DistributedSampler",
        "Manager",
        "Optimizer",
        "ProcessGroupBabyNCCL",
        "ProcessGroupBabyXCCL",
        "ProcessGroupGloo",
        "ProcessGroupNCCL",
        "ProcessGroupXCCL",
    }
    assert public == set(compat.__all__) - {"install"}
