"""Trainers whose states a holder in this process copies, and reports of copies to a lighthouse."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

from support.running import eventually
from support.training import Trainer
from torchft_svc.buddy.holder import CopyHolder, HolderConfig
from torchft_svc.coordination import LighthouseClient, LighthouseServer
from torchft_svc.core.quorum.lighthouse.copies import HeldCopy, MembersAndCopies
from torchft_svc.core.quorum.lighthouse.overview import JobStatus
from torchft_svc.rpc.security import PLAIN, Security
from torchft_svc.testing.transport_contract import bits

CALL = timedelta(seconds=5)
LONG_S = 30.0
# Steps between two copies: more than pass while one of them is fetched.
EVERY = 50
_REPORT_S = 0.5


def lighthouse(security: Security = PLAIN) -> LighthouseServer:
    return LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=500, security=security)


def holder(lighthouses: str, security: Security = PLAIN, **parts: Any) -> CopyHolder:
    config = {"lighthouse": lighthouses, "host": "127.0.0.1", "security": security, **parts}
    return CopyHolder(HolderConfig(**config))


def newest_step(held: CopyHolder) -> int:
    return max((copy.step for copy in held.described()), default=0)


def view_of(address: str, security: Security = PLAIN) -> MembersAndCopies:
    """What a holder would see of the job."""
    with LighthouseClient(address, CALL, security=security) as client:
        return client.report_copies("probe", [], CALL)


def status_of(address: str, security: Security = PLAIN) -> JobStatus:
    with LighthouseClient(address, CALL, security=security) as client:
        return next(iter(client.status()), JobStatus(job="none"))


@contextlib.contextmanager
def reported(address: str, *copies: HeldCopy) -> Iterator[None]:
    """Report each of ``copies`` as one that a process of its own holds, until the block ends."""
    is_over = threading.Event()

    def report() -> None:
        with LighthouseClient(address, CALL) as client:
            while True:
                for number, copy in enumerate(copies):
                    client.report_copies(f"holder-{number}", [copy], CALL)
                begun.set()
                if is_over.wait(_REPORT_S):
                    return

    begun = threading.Event()
    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        assert begun.wait(LONG_S)
        yield
    finally:
        is_over.set()
        thread.join(LONG_S)


class KnownCopy(NamedTuple):
    """A copy that a holder has, and the bits of the state that it is of."""

    copy: HeldCopy
    bits: Any


def train_until_copied(
    trainer: Trainer, held: CopyHolder, address: str, above: int = 0, security: Security = PLAIN
) -> KnownCopy:
    """Train until a copy above step ``above`` is held, and return that.

    The trainer has ``buddy_every=EVERY``: it stops before it offers the next one.
    """
    states: dict[int, Any] = {}

    def copied() -> bool:
        trainer.step()
        states[trainer.manager.current_step()] = bits(trainer.state_dict())
        return newest_step(held) > above

    def reported() -> HeldCopy | None:
        found = view_of(address, security).copies
        return found[0] if found and found[0].step == newest_step(held) else None

    eventually(copied, LONG_S, "no copy is held")
    copy = eventually(reported, LONG_S, "no copy is reported")
    return KnownCopy(copy, states[copy.step])
