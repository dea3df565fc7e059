"""The error tree: families, sentences, and that errors survive a process boundary."""

from __future__ import annotations

import copy
import pickle

import pytest

from torchft_svc import errors

EVERY_ERROR = [
    (
        errors.ConfigError("min_replicas", 0, "a quorum needs at least one group"),
        "min_replicas=0 cannot work: a quorum needs at least one group",
        (errors.UsageError, ValueError),
    ),
    (
        errors.AddressError("nowhere", "it has no port"),
        "address 'nowhere': it has no port",
        (errors.UsageError, ValueError),
    ),
    (
        errors.RequestRefused("group rank 3 is outside this group of 2 workers"),
        "group rank 3 is outside this group of 2 workers",
        (errors.UsageError,),
    ),
    (
        errors.OperationsDiffer("here: a sum, there: none", is_misfit=True),
        "here: a sum, there: none",
        (errors.RequestRefused,),
    ),
    (
        errors.GroupDiffers("b has another model than a"),
        "b has another model than a",
        (errors.RequestRefused,),
    ),
    (
        errors.StateDiverged("in the check of step 4, they differ", 4, ("b",), 2),
        "in the check of step 4, they differ",
        (errors.UsageError,),
    ),
    (
        errors.Unauthorized("the token is wrong"),
        "not authorized: the token is wrong",
        (errors.UsageError,),
    ),
    (
        errors.Unreachable("lighthouse", "host:29510", "connection refused"),
        "lighthouse at host:29510 cannot be reached: connection refused",
        (errors.PeerError, ConnectionError),
    ),
    (
        errors.GivenUp("manager", "host:1", "it has ended too often"),
        "manager at host:1 cannot be reached: it has ended too often",
        (errors.Unreachable,),
    ),
    (
        errors.NotLeader("host:29510"),
        "this lighthouse does not lead; the leader is host:29510",
        (errors.PeerError,),
    ),
    (
        errors.NotLeader(""),
        "this lighthouse does not lead; the leader is not known yet",
        (errors.PeerError,),
    ),
    (
        errors.DeadlineExceeded("quorum", 60.0),
        "quorum timed out after 60 s",
        (errors.PeerError, TimeoutError),
    ),
    (
        errors.DeadlineExceeded("quorum", 0.25, "waiting for b"),
        "quorum timed out after 0.25 s: waiting for b",
        (errors.PeerError, TimeoutError),
    ),
    (errors.QuorumFailed("b is out"), "no quorum: b is out", (errors.PeerError,)),
    (errors.MemberLost("b is out"), "no quorum: b is out", (errors.QuorumFailed,)),
    (errors.CommitFailed("b gave up"), "no commit decision: b gave up", (errors.PeerError,)),
    (errors.GroupLeft("told so"), "this group has left: told so", (errors.PeerError,)),
    (
        errors.ChannelClosed("/run/0-0", "its agent has ended"),
        "the channel /run/0-0 is closed: its agent has ended",
        (errors.PeerError, ConnectionError),
    ),
    (
        errors.SessionEnded("client", "it has left, or died"),
        "the client of this session is gone: it has left, or died",
        (errors.PeerError, ConnectionError),
    ),
    (
        errors.WorkerLost("exchanging what was delivered", 120.0),
        "exchanging what was delivered: another worker of this group has ended, or has not "
        "answered for 120 s; all workers of the group have to be started again",
        (errors.PeerError, ConnectionError),
    ),
    (
        errors.WorkerEnding("worker 1 failed"),
        "there is no world for this worker, its launcher is ending it: worker 1 failed",
        (errors.PeerError,),
    ),
    (
        errors.WorldSuperseded(7, "world 8 has replaced it"),
        "world 7 has no process group: world 8 has replaced it",
        (errors.PeerError,),
    ),
    (
        errors.TrainingFailed("worker 1 was killed", 3),
        "training has ended after 3 retries: worker 1 was killed",
        (errors.PeerError,),
    ),
    (
        errors.WorkerFailed("ValueError", 7, False, "Traceback: ..."),
        "a worker raised ValueError at step 7\n\nTraceback: ...",
        (errors.PeerError,),
    ),
    (
        errors.HealthCheckFailed("check-gpu 0", "ended with status 3", "ECC errors"),
        "this machine does not join: the health check 'check-gpu 0' ended with status 3: "
        "ECC errors",
        (errors.PeerError,),
    ),
    (
        errors.CheckpointError("host:1", "checksum differs"),
        "checkpoint from host:1: checksum differs",
        (errors.PeerError,),
    ),
    (
        errors.TornState("host:1", "it hung up"),
        "checkpoint from host:1: it hung up",
        (errors.PeerError, errors.CheckpointError),
    ),
]
IDS = [type(error).__name__ for error, _, _ in EVERY_ERROR]


@pytest.mark.parametrize(("error", "sentence", "families"), EVERY_ERROR, ids=IDS)
def test_an_error_says_its_sentence_and_knows_its_family(
    error: errors.TorchFTError, sentence: str, families: tuple[type[Exception], ...]
) -> None:
    assert str(error) == sentence
    for family in (*families, errors.TorchFTError):
        assert isinstance(error, family)


@pytest.mark.parametrize("error", [error for error, _, _ in EVERY_ERROR], ids=IDS)
def test_an_error_survives_pickle_and_copy(error: errors.TorchFTError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


def test_the_families_are_apart() -> None:
    for error, _, _ in EVERY_ERROR:
        assert isinstance(error, errors.UsageError) != isinstance(error, errors.PeerError)


def test_what_a_restart_cannot_mend_is_final() -> None:
    final = {type(error).__name__ for error, _, _ in EVERY_ERROR if error.is_final}
    assert final == {"ConfigError", "GroupDiffers", "StateDiverged", "Unauthorized"}


def test_every_error_of_the_tree_is_tested_and_drawn() -> None:
    leaves = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.TorchFTError)
    }
    assert {type(error) for error, _, _ in EVERY_ERROR} == leaves - {
        errors.TorchFTError,
        errors.UsageError,
        errors.PeerError,
    }
    assert errors.__doc__ is not None
    for leaf in leaves:
        assert leaf.__name__ in errors.__doc__


def test_equal_fields_do_not_make_errors_equal() -> None:
    """An error is one event: it is hashable, and compared by identity."""
    one, two = errors.QuorumFailed("x"), errors.QuorumFailed("x")
    assert one != two
    assert len({one, two}) == 2
