"""Tests copies with TLS and a token on, between trainers, holder and lighthouse."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from support.held_copies import (
    EVERY,
    LONG_S,
    KnownCopy,
    holder,
    lighthouse,
    status_of,
    train_until_copied,
)
from support.papers import TOKEN, papers
from support.running import eventually
from support.training import Trainer

from torchft_svc.client.checkpointing import HTTPTransport
from torchft_svc.coordination import LighthouseClient
from torchft_svc.errors import TorchFTError
from torchft_svc.rpc.security import PLAIN, Security
from torchft_svc.testing.transport_contract import bits

LONG = timedelta(seconds=20)
OTHER_TOKEN = "a-token-of-another-cluster"  # noqa: S105 - of these tests
DIFFERS = "the token differs from that of this service"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Security:
    return replace(papers(tmp_path_factory.mktemp("papers")).local, token=TOKEN)


@pytest.fixture(scope="module")
def copied(ours: Security) -> Iterator[KnownCopy]:
    """A copy in a secured holder, with the bits of its state."""
    with (
        lighthouse(ours) as server,
        holder(server.address(), ours) as held,
        Trainer(server.address(), "a", 1, buddy_every=EVERY, security=ours) as trainer,
    ):
        yield train_until_copied(trainer, held, server.address(), security=ours)


def test_a_worker_begins_from_a_copy_over_tls_with_a_token(
    ours: Security, copied: KnownCopy
) -> None:
    copy, state = copied
    assert copy.address.startswith("https://")
    with (
        lighthouse(ours) as server,
        LighthouseClient(server.address(), LONG, security=ours) as client,
    ):
        client.report_copies("holder", [copy], LONG)
        with Trainer(server.address(), "b", 2, buddy_every=1, security=ours) as trainer:
            trainer.optimizer.zero_grad()
            assert trainer.manager.current_step() == copy.step
            assert bits(trainer.state_dict()) == state


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"token": OTHER_TOKEN}, DIFFERS),
        ({"token": None}, "this service requires a token"),
        ({"ca_file": None, "cert_file": None, "key_file": None}, ""),
    ],
    ids=["another token", "no token", "no TLS"],
)
def test_a_copy_is_given_to_nobody_else(
    ours: Security, copied: KnownCopy, wrong: dict[str, Any], reason: str
) -> None:
    copy, _ = copied
    theirs = replace(ours, **wrong)
    with (
        HTTPTransport[Any](LONG, hostname="127.0.0.1", security=theirs) as other,
        pytest.raises(TorchFTError, match=reason),
    ):
        other.recv_checkpoint(0, copy.address, copy.step, LONG)


@pytest.mark.parametrize(("token", "reason"), [(OTHER_TOKEN, DIFFERS), (None, "requires a token")])
def test_a_holder_with_a_wrong_token_is_refused_and_both_sides_say_why(
    ours: Security, caplog: pytest.LogCaptureFixture, token: str | None, reason: str
) -> None:
    caplog.set_level(logging.INFO)
    with lighthouse(ours) as server, holder(server.address(), replace(ours, token=token)):

        def lines(*parts: str) -> list[str]:
            return [line for line in caplog.messages if all(part in line for part in parts)]

        eventually(lambda: lines("does not receive reports", reason), LONG_S, "the holder is mute")
        eventually(
            lambda: lines("refused '/torchft.LighthouseService/ReportCopies'", reason), LONG_S
        )
        assert len(lines("does not receive reports")) == 1, "it is said once"


def test_a_holder_with_tls_does_not_report_to_a_lighthouse_without(
    ours: Security, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with lighthouse(PLAIN) as server, holder(server.address(), ours):
        eventually(lambda: "does not receive reports" in caplog.text, LONG_S)
        assert status_of(server.address()).num_holders == 0
