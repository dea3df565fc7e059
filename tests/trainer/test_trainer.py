"""The trainer with real processes that are killed, frozen, or fail; on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bounds import check
from support.running import eventually
from support.trained import (
    BATCH_SIZE,
    NUM_SAMPLES,
    Faults,
    Sharing,
    assert_equal,
    data,
    model,
    optimizer,
    shared,
    train,
    weights,
)
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from torchft_svc.errors import ConfigError, TrainingFailed, WorkerFailed
from torchft_svc.trainer import TrainContext, Trainer, driver
from torchft_svc.trainer.backend import Lost, Received
from torchft_svc.trainer.messages import Position, Reported

pytestmark = pytest.mark.processes

MODES = ("restart", "per-step")
# Two workers need so many steps for a pass.
STEPS = NUM_SAMPLES // (2 * BATCH_SIZE)
# A busy machine may be late with signs of life; a test that freezes a worker waits for less.
HEARTBEAT_S, SHORT_S = 60.0, 3.0


@pytest.fixture(scope="module")
def processes() -> Iterator[Sharing]:
    with shared() as backend:
        yield backend


@pytest.fixture
def running(processes: Sharing, tmp_path: Path) -> Iterator[Any]:
    """Makes trainers of `train` with these faults, and ends them."""
    made: list[Trainer] = []

    def make(*faults: tuple[int, int, str], epochs: int = 1, **options: Any) -> Trainer:
        folder = tmp_path / f"faults-{len(made)}"
        folder.mkdir()
        config = {"faults": Faults(folder, *faults), "epochs": epochs}
        options = {"num_workers": 2, "heartbeat_timeout_s": HEARTBEAT_S, **options}
        made.append(Trainer(train, config=config, backend=processes, **options))
        return made[-1]

    yield make
    for trainer in made:
        trainer.shutdown(force=True)


def creators(processes: Sharing, **options: Any) -> Trainer:
    options = {"num_workers": 2, "batch_size": BATCH_SIZE, **options}
    made: dict[str, Any] = {
        "model_creator": model,
        "data_creator": data,
        "optimizer_creator": optimizer,
        "loss_creator": nn.MSELoss,
        **options,
    }
    return Trainer(backend=processes, **made)


@pytest.mark.parametrize("mode", MODES)
def test_creators_train_and_validate(processes: Sharing, mode: str) -> None:
    with creators(processes, fault_tolerance=mode) as trainer:
        first = trainer.train(max_retries=0)
        assert (first["epoch"], first["num_samples"]) == (1, NUM_SAMPLES)
        assert first["num_workers"] == 2
        assert not first["incidents"]
        middle = trainer.train(2, max_retries=0)
        assert (middle["epoch"], middle["step"]) == (1, first["step"] + 2)
        last = trainer.train(max_retries=0)
        assert last["epoch"] == 2
        if mode == "restart":  # else one worker may be late for a step, which the other does alone
            assert (first["step"], last["step"]) == (STEPS, 2 * STEPS)
        # Momentum makes the loss of the second pass rise with some orders of the samples.
        third = trainer.train(max_retries=0)
        assert third["train_loss"] < first["train_loss"]
        found = trainer.validate(max_retries=0)
        assert found["num_samples"] == NUM_SAMPLES
        assert isinstance(trainer.get_model(), nn.Linear)
        both = trainer.train(1, reduce_results=False, max_retries=0)
        assert {each["num_samples"] for each in both} == {BATCH_SIZE}


@pytest.fixture(scope="module")
def undisturbed(processes: Sharing, tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = {"faults": Faults(tmp_path_factory.mktemp("none")), "epochs": 2}
    with Trainer(train, config=config, backend=processes, num_workers=2) as trainer:
        trainer.train(max_retries=0)
        return weights(trainer)


@pytest.mark.parametrize("rank", [0, 1])
def test_no_step_is_lost_with_a_worker_that_is_killed(
    running: Any, undisturbed: Any, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = running((STEPS - 2, rank, "kill"), (STEPS + 1, rank, "kill"), epochs=2)
    found = trainer.train(max_retries=2)
    assert (found["result"], found["retries"]) == (2 * STEPS, 2)
    assert [each["epoch"] for each in found["reports"]] == [1, 2]
    assert [each.rung for each in found["incidents"]] == ["restart", "restart"]
    assert [each.source for each in found["incidents"]] == ["peer", "peer"]
    assert [each.lost_steps for each in found["incidents"]] == [0, 0]
    assert "SIGKILL" in found["incidents"][0].reason
    assert "RuntimeError" not in caplog.text  # what gloo says of it in the others
    assert_equal(weights(trainer), undisturbed)


def die_once_after_a_loss(config: Any) -> None:
    """Fails in one of the workers that are started for the one that has met its fault."""
    folder = config["faults"]._folder
    if (folder / "fault-0").exists():
        with contextlib.suppress(FileExistsError):
            os.close(os.open(folder / "died", os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), signal.SIGKILL)


def test_the_state_of_a_worker_is_its_own_if_the_next_ones_form_twice(
    running: Any, undisturbed: Any
) -> None:
    """The first new workers are lost before all have joined, as on a node that is lost, too."""
    trainer = running((STEPS - 2, 0, "kill"), epochs=2, setup=die_once_after_a_loss)
    found = trainer.train(max_retries=1)
    (incident,) = found["incidents"]
    assert (incident.source, incident.lost_steps, incident.why_not_peer) == ("peer", 0, "")
    assert (found["result"], found["retries"]) == (2 * STEPS, 1)
    assert_equal(weights(trainer), undisturbed)


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_is_lost_between_the_last_step_of_a_pass_and_its_end(
    running: Any, undisturbed: Any, mode: str
) -> None:
    trainer = running((-STEPS, 1, "kill"), epochs=2, fault_tolerance=mode)
    found = trainer.train(max_retries=1)
    assert trainer.position.epoch == 2
    if mode == "restart":
        assert (found["result"], found["retries"]) == (2 * STEPS, 1)
        assert_equal(weights(trainer), undisturbed)


def test_a_frozen_worker_is_killed(running: Any, processes: Sharing, undisturbed: Any) -> None:
    trainer = running((2, 1, "freeze"), epochs=2, heartbeat_timeout_s=SHORT_S)
    found = trainer.train(max_retries=1)
    assert (found["result"], found["retries"]) == (2 * STEPS, 1)
    (incident,) = found["incidents"]
    assert "was silent for 3 s" in incident.reason
    assert incident.lost_steps == 0
    assert len(processes.pids) == 2
    assert_equal(weights(trainer), undisturbed)


@pytest.mark.parametrize("what", ["kill", "freeze"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_train_on_while_a_worker_is_replaced(running: Any, rank: int, what: str) -> None:
    options = {"heartbeat_timeout_s": SHORT_S} if what == "freeze" else {}
    trainer = running((2, rank, what), epochs=4, fault_tolerance="per-step", **options)
    found = trainer.train(max_retries=0)
    assert trainer.position.epoch == 4
    assert found["retries"] == 0
    (incident,) = found["incidents"]
    assert (incident.rung, incident.lost_steps) == ("per-step", 0)


@pytest.mark.parametrize("mode", MODES)
def test_all_workers_are_killed_and_a_checkpoint_is_left(
    running: Any, mode: str, tmp_path: Path
) -> None:
    """The third pass breaks: before it begins, a checkpoint of the second one is whole."""
    trainer = running(
        (2 * STEPS + 3, 0, "kill all"),
        epochs=3,
        fault_tolerance=mode,
        checkpoint_dir=tmp_path / "checkpoints",
        checkpoint_every=1,
    )
    found = trainer.train(max_retries=2, checkpoint="auto")
    assert trainer.position.epoch == 3
    last = found["incidents"][-1]
    assert (last.rung, last.source) == ("restart", "checkpoint")


def test_all_workers_are_killed_and_the_trainer_holds_a_state(processes: Sharing) -> None:
    with creators(processes) as trainer:
        trainer.train(max_retries=0)
        before = weights(trainer)
        for pid in processes.pids.values():
            os.kill(pid, signal.SIGKILL)
        found = trainer.train(1, max_retries=1)
        assert (found["step"], found["retries"]) == (STEPS + 1, 1)
        (incident,) = found["incidents"]
        assert (incident.source, incident.lost_steps) == ("trainer", 0)
        assert incident.why_not_peer == "" or "before it offered one" in incident.why_not_peer
        assert not torch.equal(before["weight"], weights(trainer)["weight"])


def test_all_workers_are_killed_and_a_state_came_with_a_report(
    running: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = running((STEPS + 3, 0, "kill all"), epochs=2)
    found = trainer.train(max_retries=1)
    assert found["result"] == 2 * STEPS
    (incident,) = found["incidents"]
    assert (incident.source, incident.step - incident.lost_steps) == ("trainer", STEPS)
    assert f"2 workers go on from the state that the trainer holds, step {STEPS}" in caplog.text


@pytest.mark.parametrize("call", ["validate", "state_dict", "train"])
def test_all_workers_are_killed_between_two_calls_and_their_steps_are_done_again(
    processes: Sharing, tmp_path: Path, call: str
) -> None:
    """What the next call is about is the model as it was when `train` returned."""
    with creators(processes) as other:
        other.train(max_retries=0)
        state, loss = weights(other), other.validate(max_retries=0)["val_loss"]
    with creators(processes, checkpoint_dir=tmp_path) as trainer:
        trainer.train(max_retries=0, checkpoint="auto")
        for pid in processes.pids.values():
            os.kill(pid, signal.SIGKILL)
        if call == "validate":
            assert trainer.validate(max_retries=1)["val_loss"] == loss
        elif call == "state_dict":
            assert_equal(weights(trainer), state)
            assert trainer.position == Position(epoch=1, step=STEPS)
        found = trainer.train(max_retries=1, checkpoint="auto")
        assert (found["epoch"], found["step"]) == (2, 2 * STEPS)


@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_the_program_is_raised_with_its_traceback(running: Any, mode: str) -> None:
    trainer = running((3, 1, "a bad sample"), fault_tolerance=mode)
    with pytest.raises(ValueError, match="a bad sample") as raised:
        trainer.train(max_retries=0)
    cause = raised.value.__cause__
    assert isinstance(cause, WorkerFailed)
    assert "in meet" in cause.traceback
    assert (cause.kind, cause.is_repeated) == ("builtins.ValueError", False)
    found = trainer.train(max_retries=0)  # it goes on where it was
    assert found["result"] >= STEPS
    assert trainer.position.epoch == 1


@pytest.mark.parametrize("mode", MODES)
def test_the_same_error_at_the_same_step_is_not_tried_again(running: Any, mode: str) -> None:
    faults = [(3, rank, "wrong") for rank in (0, 1)] * 3
    trainer = running(*faults, (1, 0, "by chance"), fault_tolerance=mode)
    with pytest.raises(ValueError, match="wrong") as raised:
        trainer.train(max_retries=-1)
    cause = raised.value.__cause__
    assert isinstance(cause, WorkerFailed)
    assert cause.is_repeated
    assert cause.step == 3


class LateReports(Sharing):
    """Passes on what the second worker reports when the first one is lost."""

    def __init__(self) -> None:
        super().__init__()
        self._late: list[Received | Lost] = []

    def wait(self, timeout_s: float) -> list[Received | Lost]:
        passed: list[Received | Lost] = []
        for event in super().wait(timeout_s):
            is_report = isinstance(event, Received) and isinstance(event.answer, Reported)
            (self._late if is_report and event.worker == 1 else passed).append(event)
            if isinstance(event, Lost) and event.worker == 0:
                passed += self._late
                self._late = []
        return passed


def test_what_a_lost_leader_has_reported_is_not_reported_again(tmp_path: Path) -> None:
    backend = LateReports()
    config = {"faults": Faults(tmp_path, (STEPS + 1, 0, "kill")), "epochs": 2}
    try:
        with Trainer(train, config=config, backend=backend, num_workers=2) as trainer:
            found = trainer.train(max_retries=1)
        assert [each["epoch"] for each in found["reports"]] == [1, 2]
    finally:
        backend.close_all()


class Unreadable:
    """An object that can be sent, and not be read."""

    def __reduce__(self) -> Any:
        return int, ("what is no number",)


@dataclass
class Holder:
    here: Any = None


def returned(context: Any) -> Any:
    if context.config["reports"]:
        context.report(found=Unreadable())
    return context.info["what"].here


@pytest.mark.parametrize("what", ["info", "report"])
def test_objects_that_cannot_be_read_by_the_other_side_are_an_error(
    processes: Sharing, what: str
) -> None:
    Holder.__module__ = "__main__"  # which is another module in a worker
    info = {"what": Holder(Unreadable() if what == "info" else 5)}
    config = {"reports": what == "report"}
    with Trainer(returned, config=config, num_workers=2, backend=processes) as trainer:
        if what == "info":
            assert trainer.train(max_retries=0, info={"what": Holder(5)})["result"] == 5
        with pytest.raises((ValueError, WorkerFailed), match="what is no number"):
            trainer.train(max_retries=0, info=info)
        with pytest.raises(ConfigError, match="cannot be sent"):
            trainer.train(info={"lock": threading.Lock()})


class Odd(Exception):
    """Wants other arguments than it hands on."""

    def __init__(self, code: int, *, what: str) -> None:
        super().__init__(f"{what} {code}")
        self.code = code


def raise_odd(context: TrainContext) -> None:
    if context.config["kind"] == "odd":
        raise Odd(5, what="oddity")
    raise ConfigError("mine", 5, "it is too much")


def test_exceptions_come_back_as_what_they_were(processes: Sharing) -> None:
    with Trainer(raise_odd, config={"kind": "odd"}, backend=processes) as trainer:
        with pytest.raises(Odd, match="oddity 5") as raised:
            trainer.train(max_retries=0)
        assert raised.value.code == 5
        assert "in raise_odd" in str(raised.value.__cause__)


@pytest.mark.parametrize("mode", MODES)
def test_a_setting_that_cannot_work_is_not_tried_again(processes: Sharing, mode: str) -> None:
    options: dict[str, Any] = {"num_workers": 2, "fault_tolerance": mode}
    with Trainer(raise_odd, config={"kind": "config"}, backend=processes, **options) as trainer:
        with pytest.raises(ConfigError, match="mine=5 cannot work: it is too much"):
            trainer.train(max_retries=-1)
        assert len(trainer.history.incidents) == 1


def test_a_frozen_worker_does_not_hold_up_the_end(processes: Sharing) -> None:
    trainer = creators(processes, heartbeat_timeout_s=SHORT_S)
    trainer.train(max_retries=0)
    frozen = max(processes.pids)
    os.kill(processes.pids[frozen], signal.SIGSTOP)
    began_at = time.monotonic()
    trainer.shutdown()
    assert time.monotonic() < began_at + SHORT_S + 12.0  # 30 s are for workers that say something
    assert not processes.pids


def two_optimizers(net: nn.Module, config: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([each], lr=0.05) for each in net.parameters()]


def test_several_optimizers_have_one_vote(processes: Sharing) -> None:
    options: dict[str, Any] = {"optimizer_creator": two_optimizers, "fault_tolerance": "per-step"}
    found = {}
    for num_workers in (1, 2):
        with creators(processes, **options, num_workers=num_workers) as trainer:
            trainer.train(max_retries=0)
            if num_workers == 2:
                os.kill(processes.pids[max(processes.pids)], signal.SIGKILL)
            result = trainer.train(max_retries=0)
            assert (result["epoch"], result["retries"]) == (2, 0)
            found[num_workers] = trainer.state_dict()["parts"]
    assert all(len(parts["optimizers"]) == 2 for parts in found.values())


def test_no_retry_is_left(running: Any, undisturbed: Any) -> None:
    trainer = running((2, 0, "kill"), (4, 1, "kill"), epochs=2)
    with pytest.raises(TrainingFailed, match=r"after 1 retries: worker 1.*SIGKILL"):
        trainer.train(max_retries=1)
    assert trainer.position.step == 4
    found = trainer.train(max_retries=0)  # no step was lost
    assert found["result"] == 2 * STEPS
    assert_equal(weights(trainer), undisturbed)


def test_retries_are_counted_anew_after_progress(running: Any) -> None:
    trainer = running((1, 0, "kill"), (6, 1, "kill"), (11, 0, "kill"), epochs=2)
    found = trainer.train(max_retries=1, reset_retries_after=4)
    assert (found["result"], found["retries"]) == (2 * STEPS, 1)
    assert sum(len(each.lost_workers) for each in found["incidents"]) == 3  # quick ones are one


def test_a_worker_that_is_lost_between_two_calls(processes: Sharing) -> None:
    with creators(processes) as trainer:
        trainer.train(max_retries=0)
        os.kill(processes.pids[max(processes.pids)], signal.SIGKILL)
        found = trainer.train(max_retries=1)
        assert (found["epoch"], found["step"], found["retries"]) == (2, 2 * STEPS, 1)
        assert found["incidents"][0].source == "peer"
        assert found["num_samples"] == NUM_SAMPLES


@pytest.mark.parametrize("mode", MODES)
def test_all_data_are_validated_also_when_a_worker_is_lost(processes: Sharing, mode: str) -> None:
    with creators(processes, fault_tolerance=mode) as trainer:
        trainer.train(max_retries=0)
        whole = trainer.validate(max_retries=0)
        os.kill(processes.pids[max(processes.pids)], signal.SIGKILL)
        again = trainer.validate(max_retries=1)
        assert again["num_samples"] == NUM_SAMPLES
        assert again["val_loss"] == pytest.approx(whole["val_loss"])


def test_the_user_interrupts(running: Any, undisturbed: Any, tmp_path: Path) -> None:
    trainer = running((STEPS, 0, "freeze"), epochs=2)

    def interrupt() -> None:
        eventually((tmp_path / "faults-0" / "fault-0").exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, name="interrupt")
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    thread.join()
    assert not trainer.num_workers
    found = trainer.train(max_retries=0)
    assert found["result"] == 2 * STEPS
    assert_equal(weights(trainer), undisturbed)


class Tricky:
    """A result that can be read in the process that made it, but not elsewhere."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_tricky, (os.getpid(),)


def _read_tricky(pid: int) -> None:
    if os.getpid() != pid:
        raise ValueError("not here")


def return_what_cannot_be_read(context: TrainContext) -> Tricky:
    train(context)
    return Tricky()


def test_a_result_that_cannot_be_read(processes: Sharing, tmp_path: Path) -> None:
    config = {"faults": Faults(tmp_path), "epochs": 1}
    with Trainer(return_what_cannot_be_read, config=config, backend=processes) as trainer:
        with pytest.raises(WorkerFailed, match="not here") as raised:
            trainer.train(max_retries=0)
        assert raised.value.__cause__ is None, "an error that is its own cause has no end"
        assert not processes.pids


def test_one_call_at_a_time_and_the_end_from_another_thread(running: Any, tmp_path: Path) -> None:
    trainer = running((2, 0, "freeze"))
    raised: list[BaseException] = []

    def go() -> None:
        try:
            trainer.train()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=go, name="train")
    thread.start()
    eventually((tmp_path / "faults-0" / "fault-0").exists)
    for call in (trainer.train, trainer.state_dict, trainer.save, lambda: trainer.load("here")):
        with pytest.raises(ConfigError, match="another call of it has not returned"):
            call()
    trainer.shutdown()
    thread.join(20.0)
    (error,) = raised
    assert isinstance(error, TrainingFailed)
    assert "was shut down" in str(error)


def test_a_signal_handler_shuts_down(running: Any, processes: Sharing, tmp_path: Path) -> None:
    trainer = running((2, 0, "freeze"))
    before = signal.signal(signal.SIGUSR1, lambda *_: trainer.shutdown())

    def send() -> None:
        eventually((tmp_path / "faults-0" / "fault-0").exists)
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=send, name="send")
    thread.start()
    try:
        with pytest.raises(TrainingFailed, match="was shut down"):
            trainer.train()
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert not processes.pids


@pytest.mark.parametrize("is_forked", [False, True])
def test_the_user_interrupts_while_workers_are_started(
    running: Any, processes: Sharing, monkeypatch: pytest.MonkeyPatch, is_forked: bool
) -> None:
    fork, asked = processes._server.fork, []

    def interrupted(*arguments: Any) -> int:
        if is_forked and asked:
            fork(*arguments)
        asked.append(arguments)
        if is_forked == len(asked) - 1:
            raise KeyboardInterrupt
        return fork(*arguments)

    trainer = running()
    monkeypatch.setattr(processes._server, "fork", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    monkeypatch.undo()
    assert not processes.pids
    assert trainer.train(max_retries=0)["result"] == STEPS


@pytest.mark.parametrize("num_started", [0, 1])
def test_workers_that_cannot_be_started(
    running: Any,
    processes: Sharing,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    num_started: int,
) -> None:
    """The folder of the program is removed: the error is raised at once, and nothing is left."""
    folder, fork = tmp_path / "removed", processes._server.fork
    folder.mkdir()

    def fork_and_remove(*arguments: Any) -> int:
        pid = fork(*arguments)
        folder.rmdir()
        return pid

    trainer = running()
    monkeypatch.chdir(folder)
    if num_started:
        monkeypatch.setattr(processes._server, "fork", fork_and_remove)
    else:
        folder.rmdir()
    began_at = time.monotonic()
    with pytest.raises(FileNotFoundError):
        trainer.train()
    check("the end after a start that failed", time.monotonic() - began_at, driver._INTERRUPT_S / 2)
    monkeypatch.undo()
    assert not processes.pids
    assert not processes._shares._reserved
    assert trainer.train(max_retries=0)["result"] == STEPS


# -- resources -----------------------------------------------------------------------------------


@pytest.fixture
def cpus(processes: Sharing, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What there is; may change."""
    there = {"CPU": 2.0}
    monkeypatch.setattr(processes._shares, "_resources", lambda: there)
    return there


def test_fewer_workers_than_asked_for_grow_at_the_next_pass(
    processes: Sharing, cpus: dict[str, float]
) -> None:
    cpus["CPU"] = 1.0
    with creators(processes) as trainer:
        first = trainer.train(max_retries=0)
        assert (first["num_workers"], first["step"]) == (1, 2 * STEPS)
        cpus["CPU"] = 5.0
        second = trainer.train(max_retries=0)
        assert (second["num_workers"], second["step"]) == (2, 3 * STEPS)
        (incident,) = second["incidents"]
        assert (incident.rung, incident.source, incident.lost_steps) == ("growth", "peer", 0)


def test_workers_are_added_at_a_report(running: Any, cpus: dict[str, float]) -> None:
    cpus["CPU"] = 1.0
    trainer = running(epochs=20, grow_every_s=0.01)  # so many that it is over later than that
    watching = threading.Event()

    def give() -> None:
        eventually(lambda: trainer.position.step >= 1 or watching.is_set())
        cpus["CPU"] = 2.0

    thread = threading.Thread(target=give, name="give")
    thread.start()
    found = trainer.train(max_retries=0)
    watching.set()
    thread.join()
    assert (found["num_workers"], found["retries"]) == (2, 0)
    assert [each.rung for each in found["incidents"]] == ["growth"]
    assert trainer.position.epoch == 20


@pytest.mark.parametrize("mode", MODES)
def test_a_lost_place_is_filled_when_there_are_resources_again(
    processes: Sharing, cpus: dict[str, float], mode: str
) -> None:
    with creators(processes, fault_tolerance=mode, first_pause_s=0.1) as trainer:
        trainer.train(max_retries=0)
        cpus["CPU"] = 1.0
        os.kill(processes.pids[max(processes.pids)], signal.SIGKILL)
        found = trainer.train(max_retries=1)
        assert (found["epoch"], found["num_workers"]) == (2, 1)
        cpus["CPU"] = 2.0
        # With ``per-step`` the others do not wait for the new one, and passes are short here.
        eventually(lambda: trainer.train(max_retries=0)["num_workers"] == 2)


def test_without_resources_the_trainer_waits_for_them(
    running: Any, cpus: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    cpus["CPU"] = 0.0
    trainer = running(first_pause_s=0.05, max_pause_s=0.2)

    def give() -> None:
        eventually(lambda: caplog.text.count("are needed: looking again in 0.") > 3)
        cpus["CPU"] = 2.0

    thread = threading.Thread(target=give, name="give")
    thread.start()
    found = trainer.train(max_retries=0)
    thread.join()
    assert (found["result"], found["retries"]) == (STEPS, 0)


def test_without_resources_retries_come_to_an_end(running: Any, cpus: dict[str, float]) -> None:
    cpus["CPU"] = 0.0
    trainer = running(first_pause_s=0.05, max_pause_s=0.1, resources_timeout_s=0.2)
    began_at = time.monotonic()
    with pytest.raises(TrainingFailed, match="no resources for 1 workers"):
        trainer.train(max_retries=1)
    assert time.monotonic() > began_at + 0.3


# -- what cannot work ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_wokers": 2}, "num_wokers.*did you mean num_workers"),
        ({"num_workers": 0}, "num_workers=0 cannot work: use a whole number, 1 or more"),
        ({"min_workers": 3}, "min_workers=3 cannot work: use 1 to num_workers=2"),
        ({"backend": "rya"}, "use 'local', 'ray' or a Backend"),
        ({"fault_tolerance": "none"}, "fault_tolerance"),
        ({"checkpoint_dir": "/proc/nowhere"}, "checkpoint_dir"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
        ({"heartbeat_timeout_s": 0}, "heartbeat_timeout_s"),
        ({"resources_per_worker": {"GPU": -1}}, "resources_per_worker"),
        ({"config": {"lock": threading.Lock()}}, "config.*cannot be sent to a worker"),
        ({"model_creator": None}, "model_creator.*give train_fn, or all of"),
        ({"loss_creator": None}, "loss_creator.*give it, or batch_loss"),
        ({"checkpoint_dir": ""}, "checkpoint_dir.*it is empty"),
        ({"checkpoint_dir": 5}, "checkpoint_dir.*use a path, or a URL"),
        ({"config": {"batch_size": 0}}, "batch_size=0 cannot work"),
        ({"config": {"batch_size": "many"}}, "batch_size='many' cannot work"),
        ({"seed": 0.5}, "seed=0.5 cannot work: use a whole number"),
        ({"run_name": ""}, "run_name"),
        ({"use_gpu": "yes"}, "use_gpu"),
        ({"backend": Sharing}, "use 'local', 'ray' or a Backend"),
        (
            {"backend": "local", "resources_per_worker": {"GPU": 1000}},
            "this machine has room for 0",
        ),
        ({"backend": "local", "num_workers": 999, "min_workers": 999}, "min_workers is 999"),
    ],
)
def test_settings_that_cannot_work(
    processes: Sharing, options: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {
        "model_creator": model,
        "data_creator": data,
        "optimizer_creator": optimizer,
        "loss_creator": nn.MSELoss,
        "num_workers": 2,
        "backend": processes,
        **options,
    }
    with pytest.raises(ConfigError, match=message):
        Trainer(**given)
    assert not processes.pids


def test_arguments_that_cannot_work(processes: Sharing) -> None:
    with creators(processes) as trainer:
        for call in (
            lambda: trainer.train(max_retries=-2),
            lambda: trainer.train(0),
            lambda: Trainer(print, backend=processes).train(3),
            lambda: Trainer(print, backend=processes, checkpoint_dir="memory://here"),
            lambda: trainer.train(retries=3),
            lambda: trainer.train(reset_retries_after=0),
            lambda: trainer.train(checkpoint=5),  # type: ignore[arg-type]
            lambda: Trainer(train, backend=processes).validate(),
            lambda: trainer.validate(max_retries=1.5),  # type: ignore[arg-type]
        ):
            with pytest.raises(ConfigError):
                call()
        assert not processes.pids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_creator": lambda config: None}, "model_creator.*return a torch Module"),
        ({"optimizer_creator": lambda net, config: None}, "optimizer_creator.*a torch Optimizer"),
        (
            {"scheduler_creator": lambda steps, config: ReduceLROnPlateau(steps)},
            "ReduceLROnPlateau.*use a training function",
        ),
        ({"batch_loss": lambda net, batch, info: None}, "batch_loss.*let it return a tensor"),
    ],
)
def test_creators_that_return_what_cannot_work(
    processes: Sharing, options: dict[str, Any], message: str
) -> None:
    with creators(processes, **options) as trainer, pytest.raises(ConfigError, match=message):
        trainer.train(max_retries=-1)


def test_a_checkpoint_in_memory(processes: Sharing) -> None:
    with creators(processes) as trainer:
        trainer.train(1, max_retries=0)
        path = trainer.save("memory://trainer-test/saved")
        trainer.train(1, max_retries=0)
        after = weights(trainer)
        trainer.load(path)
        trainer.train(1, max_retries=0)
        assert_equal(weights(trainer), after)


def test_a_state_that_does_not_fit_changes_nothing(processes: Sharing, tmp_path: Path) -> None:
    with creators(processes) as trainer:
        trainer.train(1, max_retries=0)
        path = trainer.save(tmp_path / "saved")
        state = trainer.state_dict()
        before = dict(processes.pids)
        wrong = {**state, "parts": {**state["parts"], "model": {"weight": torch.zeros(3, 3)}}}
        with pytest.raises(ConfigError, match="not of this model"):
            trainer.load_state_dict(wrong)
        assert processes.pids == before
        trainer.train(1, max_retries=0)
        after = weights(trainer)
        trainer.load(path)
        trainer.train(1, max_retries=0)
        assert_equal(weights(trainer), after)
        trainer.load_state_dict(state)
        trainer.train(1, max_retries=0)
        assert_equal(weights(trainer), after)
    with pytest.raises(ConfigError, match="shut down"):
        trainer.train()
