"""Tests training with mutual TLS and a token, and the errors of a trainer that is refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from support.bounds import Late, check
from support.papers import TOKEN, Papers, papers, variables
from support.running import eventually, sidecar_of, steady_address
from support.training import Trainer, assert_identical, together

from torchft_svc.coordination import LighthouseServer
from torchft_svc.core.quorum.manager.lighthouse_link import DISTRUST_PAUSE_S
from torchft_svc.errors import TorchFTError, Unauthorized, Unreachable
from torchft_svc.rpc.security import PLAIN, Security

pytestmark = pytest.mark.processes
OTHER_TOKEN = "a-token-of-another-cluster"  # noqa: S105 - of these tests


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return papers(tmp_path_factory.mktemp("papers"))


@pytest.fixture
def known(some: Papers) -> Security:
    return replace(some.local, token=TOKEN)


@pytest.fixture
def address(known: Security) -> Iterator[str]:
    with LighthouseServer("127.0.0.1:0", 1, 2000, security=known) as server:
        yield server.address()


@pytest.mark.parametrize("in_process", [True, False], ids=["in-process", "sidecar"])
def test_groups_train_and_heal(address: str, known: Security, in_process: bool) -> None:
    options: dict[str, Any] = {"security": known, "in_process": in_process}
    with Trainer(address, "a", 0, **options) as a:
        a.until(3)
        with Trainer(address, "b", 1, **options) as b:
            together(lambda: a.meets(2), lambda: b.meets(2))
            together(a.step, b.step)
            assert_identical([a, b])
            assert b.manager.current_step() > 3


def test_a_sidecars_secret_is_not_on_its_command_line(address: str, known: Security) -> None:
    with Trainer(address, "a", 0, security=known, in_process=False):
        manager = sidecar_of("a")
        assert TOKEN not in " ".join(manager.cmdline())
        assert manager.environ()["TORCHFT_TOKEN"] == TOKEN


def test_an_argument_beats_the_environment_also_in_the_sidecar(
    address: str, known: Security, some: Papers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables(some.theirs.issue("elsewhere")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHFT_TOKEN_FILE", "/nowhere")
    with Trainer(address, "a", 0, security=known, in_process=False) as a:
        assert a.step()


def complaint(address: str, security: Security, **options: Any) -> TorchFTError:
    """The error of the trainer, which comes soon."""
    began_at = time.monotonic()
    with (
        pytest.raises(TorchFTError) as caught,
        Trainer(address, "a", 0, security=security, **options) as a,
    ):
        a.steps(3)
    check("a trainer is informed", time.monotonic() - began_at, 15)
    return caught.value


@pytest.mark.parametrize("in_process", [True, False], ids=["in-process", "sidecar"])
def test_a_trainer_with_a_wrong_token_is_informed_what_to_set(
    address: str, known: Security, some: Papers, in_process: bool
) -> None:
    for security, reason in (
        (some.local, "this service requires a token: set TORCHFT_TOKEN or TORCHFT_TOKEN_FILE"),
        (replace(known, token=OTHER_TOKEN), "the token differs from that of this service"),
    ):
        error = complaint(address, security, in_process=in_process)
        assert isinstance(error, Unauthorized)
        assert reason in str(error)
        assert "lighthouse at " in str(error)


def test_a_trainer_that_resumed_is_informed_too(address: str, some: Papers) -> None:
    """The quorum is asynchronous after step 0: its error would only discard the steps."""
    with Trainer(address, "a", 0, security=some.local) as a:
        a.manager.load_state_dict({"step": 7, "batches_committed": 7})
        a.backward()
        with pytest.raises(Unauthorized, match="requires a token"):
            a.optimizer.step()


def test_a_trainer_with_a_wrong_certificate_is_informed_what_to_set(
    address: str, known: Security, some: Papers
) -> None:
    stranger = replace(some.theirs.issue("127.0.0.1"), token=TOKEN)
    error = complaint(address, stranger)
    assert isinstance(error, Unauthorized)
    assert "set TORCHFT_TLS_CA to the CA that signed it" in str(error)


def test_a_plain_trainer_is_informed_within_the_connect_timeout(address: str) -> None:
    error = complaint(address, PLAIN, connect_timeout=timedelta(seconds=1))
    assert isinstance(error, Unreachable)
    if "it may require TLS" not in str(error):
        raise Late(str(error))


def test_a_trainer_that_trains_goes_on_when_its_lighthouse_is_as_it_was(
    known: Security,
) -> None:
    """A lighthouse that came back with another token, by mistake, costs steps and no trainer."""
    address = steady_address()
    with (
        LighthouseServer(address, 1, security=known) as first,
        Trainer(first.address(), "a", 0, security=known) as a,
    ):
        assert a.step()
        first.shutdown()
        with LighthouseServer(address, 1, security=replace(known, token=OTHER_TOKEN)):
            began_at = time.monotonic()
            assert a.steps(3) == [False] * 3
            assert time.monotonic() - began_at >= DISTRUST_PAUSE_S, "it would fill its log"
        with LighthouseServer(address, 1, security=known):
            eventually(a.step, what="it never committed again")
