"""What a lighthouse reports of itself to whoever checks the settings of a trainer."""

from __future__ import annotations

from dataclasses import dataclass

from torchft_svc.core.limits import one_line
from torchft_svc.core.quorum.types import QuorumConfig
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.records import Codec, milliseconds
from torchft_svc.version import VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """A lighthouse's version, wall clock (``unix_s``) and settings; durations in seconds.

    ``hang_timeout_s``: None if it is off. ``is_elected``: it leads because of an election.
    """

    version: str
    unix_s: float
    min_replicas: int
    join_timeout_s: float
    heal_timeout_s: float
    startup_timeout_s: float
    startup_wait_s: float
    heartbeat_timeout_s: float
    hang_timeout_s: float | None = None
    on_hang: str = "report"
    is_elected: bool = False


_DURATIONS = ("join", "heal", "startup", "heartbeat", "hang")
_CODEC = Codec(
    About,
    pb.LighthouseAboutResponse,
    fields={f"{name}_timeout_s": milliseconds(f"{name}_timeout_ms") for name in _DURATIONS}
    | {"startup_wait_s": milliseconds("startup_wait_ms")},
    texts=one_line,
)


def about_lighthouse(config: QuorumConfig, unix_s: float, *, is_elected: bool) -> About:
    """Return what a lighthouse with this configuration reports at ``unix_s``."""
    return About(
        version=VERSION,
        unix_s=unix_s,
        min_replicas=config.min_replicas,
        join_timeout_s=config.join_timeout_s,
        heal_timeout_s=config.healing_timeout_s,
        startup_timeout_s=config.newcomer_timeout_s,
        startup_wait_s=config.startup_wait_s,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        hang_timeout_s=config.hang_timeout_s,
        on_hang=config.on_hang,
        is_elected=is_elected,
    )


def about_to_wire(about: About) -> pb.LighthouseAboutResponse:
    return _CODEC.to_wire(about)


def about_from_wire(message: pb.LighthouseAboutResponse) -> About:
    """The report, with texts that are fit for a terminal."""
    return _CODEC.from_wire(message)
