"""The node and the settings that an agent sends a lighthouse, from torchrun's arguments."""

from __future__ import annotations

import math
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchft_svc.core.launch.world import Node, RunSettings
from torchft_svc.core.limits import MAX_NAME_LENGTH, check_name
from torchft_svc.env import Environment
from torchft_svc.errors import ConfigError, RequestRefused
from torchft_svc.host.address import LOOPBACK, advertised_host, parse_address, split_addresses
from torchft_svc.host.interfaces import chosen_host

# The back end's name for torchrun.
BACKEND = "lighthouse"
# A host name and a process id show people which agent it is; the rest makes the id a new one.
_SHOWN_HOST_LENGTH = MAX_NAME_LENGTH - 40
# A lighthouse that is started at the same time as its agents is there within seconds.
CONNECT_TIMEOUT_S = 60.0
_SECONDS = ("join_timeout", "last_call_timeout", "connect_timeout", "failure_window")
_NUMBERS = ("rank", "num_workers", "max_run_failures", "max_node_failures")
# The last one is added to all back ends' keys by torch's launcher, and means nothing here.
_KEYS = (*_SECONDS, *_NUMBERS, "role", "exit_barrier", "timeout")
_MAX_SECONDS = 1e7
# Who has to finish before the first one that has finished ends: the nodes that live, or all.
EXIT_BARRIERS = ("alive", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousConfig:
    """The rendezvous of one agent.

    ``endpoint``: lighthouses, with commas between; empty: one of its own.

    ``connect_timeout_s``: how long no lighthouse may be found at the start.
    """

    endpoint: str
    run_id: str
    node: Node
    settings: RunSettings
    connect_timeout_s: float = CONNECT_TIMEOUT_S


def rendezvous_config(
    *,
    endpoint: str,
    run_id: str,
    min_nodes: int,
    max_nodes: int,
    local_addr: str | None = None,
    options: Mapping[str, Any] | None = None,
    is_soft: bool = False,
) -> RendezvousConfig:
    """Make it of what `RendezvousParameters` holds; ``options``: the keys of ``--rdzv-conf``.

    ``join_timeout``: seconds for which fewer than ``min_nodes`` are waited for, and a free place.
    ``last_call_timeout``: those that come within so many seconds of the first one join together.
    ``connect_timeout``: seconds in which a lighthouse must be found at the start. ``rank``: the
    node rank. ``num_workers``, ``role``: of this node. ``max_run_failures``, ``max_node_failures``,
    ``failure_window``, ``exit_barrier``: see `LaunchConfig`. ``is_soft``: the policy is.

    Raises:
        ConfigError: a key is not known, or its value cannot work.
        AddressError: ``endpoint`` cannot be parsed.
    """
    options = {} if options is None else options
    for key in options:
        if key not in _KEYS:
            known = ", ".join(sorted(set(_KEYS) - {"timeout"}))
            raise ConfigError(f"rdzv_conf {key}", options[key], f"the lighthouse knows {known}")
    defaults = RunSettings(min_nodes=1, max_nodes=1)
    settings = RunSettings(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        join_timeout_s=_seconds(options, "join_timeout", defaults.join_timeout_s),
        join_window_s=_seconds(options, "last_call_timeout", defaults.join_window_s),
        max_run_failures=_number(options, "max_run_failures"),
        max_node_failures=_number(options, "max_node_failures"),
        failure_window_s=_seconds(options, "failure_window", defaults.failure_window_s),
        waits_for_lost=_waits_for_lost(options),
        is_soft=is_soft,
    )
    is_own = _is_own_lighthouse(endpoint)
    node = Node(
        node_id=new_node_id(),
        host=local_addr or (LOOPBACK if is_own else _host_for(endpoint)),
        num_workers=_number(options, "num_workers") or 1,
        role=str(options.get("role", "default")),
        rank=_number(options, "rank"),
    )
    _check("rdzv_id", run_id, lambda: check_name("it", run_id))
    shown = [f"nnodes={min_nodes}:{max_nodes}", *(f"{key}={options[key]}" for key in options)]
    _check("the run's settings", ",".join(shown), settings.check)
    _check("node", node.node_id, node.check)
    if is_own and max_nodes > 1:
        reason = f"up to {max_nodes} nodes have to meet: name host:port of a lighthouse"
        raise ConfigError("rdzv_endpoint", endpoint, reason)
    return RendezvousConfig(
        endpoint="" if is_own else endpoint,
        run_id=run_id,
        node=node,
        settings=settings,
        connect_timeout_s=_seconds(options, "connect_timeout", CONNECT_TIMEOUT_S),
    )


def new_node_id() -> str:
    """Return a name that no other agent has, nor a later one of this node."""
    host = "".join(char for char in socket.gethostname() if char.isprintable())
    return f"{host[:_SHOWN_HOST_LENGTH]}-{os.getpid()}-{uuid.uuid4().hex[:12]}"


def _is_own_lighthouse(endpoint: str) -> bool:
    """Whether the agent shall start one: there is no endpoint, or its port is 0."""
    if not endpoint.strip():
        return True
    return "," not in endpoint and parse_address(endpoint, may_bind=True).port == 0


def _host_for(endpoint: str) -> str:
    chosen = chosen_host(Environment())
    return chosen or advertised_host(*map(parse_address, split_addresses(endpoint)))


def _check(field: str, value: object, check: Any) -> None:
    try:
        check()
    except RequestRefused as error:
        raise ConfigError(field, str(value)[:80], str(error)) from None


def _seconds(options: Mapping[str, Any], key: str, default: float) -> float:
    value = options.get(key, default)
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds <= _MAX_SECONDS:
        raise ConfigError(f"rdzv_conf {key}", value, "use a number of seconds, 0 or more")
    return seconds


def _waits_for_lost(options: Mapping[str, Any]) -> bool:
    value = options.get("exit_barrier", "alive")
    if value not in EXIT_BARRIERS:
        raise ConfigError("rdzv_conf exit_barrier", value, "use alive or all")
    return bool(value == "all")


def _number(options: Mapping[str, Any], key: str) -> int | None:
    value = options.get(key)
    if value is None:
        return None
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"rdzv_conf {key}", value, "use a whole number") from None
