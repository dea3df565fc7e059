"""The log of a trainer on stderr, unless its program configures logging itself."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torchft_svc.host.log_format import Speaker, make_formatter
from torchft_svc.host.log_limit import LimitedLog, level_number

if TYPE_CHECKING:
    from torchft_svc.client.step.shared_round import SharedRound
    from torchft_svc.settings import GroupPlace, ServiceOptions

_PACKAGE = "torchft_svc"


class StepPosition:
    """The step and the quorum of ``worker``, as soon as there is one; for lines of JSON."""

    def __init__(self) -> None:
        self.worker: SharedRound | None = None

    def describe(self) -> dict[str, object]:
        """The fields of this moment."""
        if self.worker is None:
            return {}
        quorum = self.worker.round.peers.quorum
        quorum_id = {} if quorum is None else {"quorum_id": quorum.quorum_id}
        return {"step": self.worker.state.step, **quorum_id}


def speaker_of(place: GroupPlace, options: ServiceOptions, position: StepPosition) -> Speaker:
    """How the lines of a worker name it."""
    worker = f"/{place.group_rank}" if place.group_world_size > 1 else ""
    fields = {"job": options.job_id, "group": options.replica_name, "rank": place.group_rank}
    return Speaker(f"{options.replica_name}{worker}", fields, position.describe)


class TrainerLog(LimitedLog):
    """Writes the package's lines to stderr, until the program configures logging.

    ``speaker`` names the replica group in the lines.
    """

    is_ours = True

    def __init__(self, level: int, log_format: str, speaker: Speaker) -> None:
        super().__init__()
        self._level = level
        self._format = log_format
        self._speaker = speaker
        self.setFormatter(make_formatter(log_format, speaker))

    def name_group(self, speaker: Speaker) -> None:
        """Name the group of another manager, whose lines follow; no group, if that has another
        name."""
        self._speaker = speaker if speaker.name == self._speaker.name else Speaker()
        self.setFormatter(make_formatter(self._format, self._speaker))

    def attach(self) -> None:
        """Handle the package's lines, and do not propagate them to the root logger."""
        package = logging.getLogger(_PACKAGE)
        if package.level == logging.NOTSET:
            package.setLevel(self._level)
        package.addHandler(self)
        package.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        package = logging.getLogger(_PACKAGE)
        others = [each for each in package.handlers if not getattr(each, "is_ours", False)]
        if not others and not logging.root.handlers:
            super().emit(record)
            return
        if package.level == self._level:
            package.setLevel(logging.NOTSET)
        if logging.getLogger(record.name).isEnabledFor(record.levelno):
            # The caller continues with the handlers of the old list, and then with the root logger.
            package.handlers = [each for each in package.handlers if each is not self]
            package.propagate = True


def speak_on_stderr(level: str, log_format: str, speaker: Speaker) -> None:
    """Write the package's lines of ``level`` and above to stderr.

    Does nothing if the program has configured logging (the root logger, or this package's, has
    handlers).
    """
    package = logging.getLogger(_PACKAGE)
    for handler in package.handlers:
        if isinstance(handler, TrainerLog):
            handler.name_group(speaker)
    others = [each for each in package.handlers if not getattr(each, "is_exporter", False)]
    if others or logging.root.handlers or not package.propagate:
        return
    TrainerLog(level_number(level), log_format, speaker).attach()
