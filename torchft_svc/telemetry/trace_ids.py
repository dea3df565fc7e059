"""The ids of the trace of a quorum change, which all programs compute alike.

So the spans of the lighthouse and of all trainers are one trace, without any message more.
"""

from __future__ import annotations

import hashlib


def trace_id(job: str, quorum_id: int) -> int:
    """The id of the trace of the change to a quorum: 128 bits, never 0."""
    return _digest("trace", job, quorum_id, 16)


def change_span_id(job: str, quorum_id: int) -> int:
    """The id of that trace's first span, which is the lighthouse's: 64 bits, never 0."""
    return _digest("span", job, quorum_id, 8)


def _digest(kind: str, job: str, quorum_id: int, num_bytes: int) -> int:
    text = f"{kind}\0{job}\0{quorum_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=num_bytes).digest(), "big") or 1
