"""Writes the collectives of a quorum that ended with an error: a file per quorum and member."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import threading
import time
from pathlib import Path
from urllib.parse import quote

from torchft_svc.client.process_groups.members import Members
from torchft_svc.client.process_groups.recording.flight import FlightLog, FlightSnapshot
from torchft_svc.errors import ConfigError

log = logging.getLogger(__name__)

# Several steps of a large model: as many as torch's own recorder keeps.
NUM_RECORDS = 2000
# The newest quorums whose files are kept; a file of 2000 collectives has about 330 KB.
MAX_QUORUMS = 50
# If the disk is too slow for more writers at once, records are dropped.
_MAX_WRITERS = 2
_QUORUM = re.compile(r"quorum_(\d+)")


class FlightRecorder:
    """Records the collectives of this process' groups, for `ProcessGroup.record_to`.

    Files are ``quorum_<id>/group_rank_<g>/rank_<replica rank>`` below ``directory``, which may be
    on a local disk: the names of one quorum's files are unique across machines. They are written
    on a thread, which logs its errors.

    Args:
        directory: of one job, because quorum ids are unique per job; created if missing.
        num_records: how many collectives of a quorum are kept, the newest ones.

    Raises:
        ConfigError: the directory cannot be made.
    """

    def __init__(self, directory: Path, num_records: int = NUM_RECORDS) -> None:
        if num_records < 1:
            raise ConfigError("num_records", num_records, "use 1 or more")
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("flight_recorder", str(directory), f"no directory: {error}") from None
        self._directory = directory
        self._num_records = num_records
        self._lock = threading.Lock()
        self._writers: list[threading.Thread] = []

    @classmethod
    def of_job(cls, directory: str, job_id: str) -> FlightRecorder:
        """A recorder below a directory that several jobs may share."""
        return cls(Path(directory) / f"job_{quote(job_id, safe='')}")

    def begin(self, members: Members, backend: str) -> FlightLog | None:
        """A log for ``members``, connected over ``backend``; None if they have no quorum id."""
        if members.quorum_id is None:
            return None
        return FlightLog(members, backend, self._num_records)

    def write(self, snapshot: FlightSnapshot, why: str) -> None:
        """Write ``snapshot`` on a thread; returns at once."""
        with self._lock:
            self._writers = [writer for writer in self._writers if writer.is_alive()]
            if len(self._writers) >= _MAX_WRITERS:
                log.warning("the flight of %s is not recorded: too slow a disk", _named(snapshot))
                return
            writer = threading.Thread(
                target=self._write, args=(snapshot, why), name="torchft-flight", daemon=True
            )
            try:
                writer.start()
            except RuntimeError as error:  # torch may be out of threads, or the interpreter ends
                log.warning("the flight of %s is not recorded: %s", _named(snapshot), error)
                return
            self._writers.append(writer)

    def close(self, timeout_s: float) -> None:
        """Wait until everything is written; idempotent."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            writers = list(self._writers)
        for writer in writers:
            writer.join(max(0.0, deadline - time.monotonic()))

    def _write(self, snapshot: FlightSnapshot, why: str) -> None:
        members = snapshot.members
        folder = self._directory / f"quorum_{members.quorum_id}"
        folder /= f"group_rank_{members.group_rank or 0}"
        path = folder / f"rank_{members.rank}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A name that the analyzer ignores.
            aside = folder / f".{members.rank}.{os.getpid()}.part"
            # The only format that the analyzer reads; this package never unpickles it.
            aside.write_bytes(pickle.dumps(snapshot.as_trace(why)))
            aside.replace(path)
            self._forget_old()
        except Exception:
            log.exception("the flight of %s cannot be written", _named(snapshot))
        else:
            log.warning(
                "flight of %s: %s (%s): %s", _named(snapshot), snapshot.summary(), why, path
            )

    def _forget_old(self) -> None:
        found = [(_QUORUM.fullmatch(path.name), path) for path in self._directory.iterdir()]
        quorums = sorted((int(match[1]), path) for match, path in found if match)
        for _, path in quorums[:-MAX_QUORUMS]:
            _remove(path)


def _named(snapshot: FlightSnapshot) -> str:
    members = snapshot.members
    return f"quorum {members.quorum_id}, replica rank {members.rank} of {members.world_size}"


def _remove(quorum: Path) -> None:
    """Remove only our files; another process may do the same."""
    for group in quorum.glob("group_rank_*"):
        for file in (*group.glob("rank_*"), *group.glob(".*.part")):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            group.rmdir()
    with contextlib.suppress(OSError):
        quorum.rmdir()
