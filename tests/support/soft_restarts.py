"""Workers of the soft restart example live through all kinds of changes; agents are faked."""

from __future__ import annotations

from pathlib import Path

from support.fake_agents import FakeAgents, FakeWorker
from support.running import ROOT, eventually
from support.trained_steps import Step, check_all, check_survivor, trained
from torchft_svc.elastic import WorldChangeEvent

UP, DOWN = WorldChangeEvent.SCALE_UP, WorldChangeEvent.SCALE_DOWN
EXAMPLE = ROOT / "examples" / "soft_restart.py"
PATIENCE_S = 60.0


def steps_of(worker: FakeWorker) -> list[Step]:
    return trained(worker.lines())


def train_in(round_: int, *workers: FakeWorker) -> int:
    """Wait until all of them train in this world; the newest step."""

    def newest(worker: FakeWorker) -> int:
        assert worker.process.poll() is None, worker.log.read_text()
        found = [each for each in steps_of(worker) if each.round == round_]
        assert all(each.world_size == len(workers) for each in found)
        return found[-1].step if len(found) >= 3 else 0

    eventually(lambda: all(map(newest, workers)), PATIENCE_S, f"no steps in world {round_}")
    return max(map(newest, workers))


def live_through_every_change(agents: FakeAgents, script: Path, *options: str) -> None:
    """Kill, freeze and add workers; assert that the others keep their process, their step, and the
    same bits. ``script`` with ``options`` runs the example."""

    def start() -> FakeWorker:
        return agents.start(script, *options, "--steps", "100000", "--step-s", "0.005")

    workers = one, two, three, four = [start() for _ in range(4)]
    steps = [train_in(agents.world(*workers), *workers)]

    two.kill()  # a worker of its node, whose others are ended
    three.kill()
    agents.pause(one, four, change=DOWN)
    steps.append(train_in(agents.world(one, four, change=DOWN), one, four))

    five = start()
    agents.pause(one, four, change=UP)
    steps.append(train_in(agents.world(one, four, five, change=UP), one, four, five))

    four.freeze()  # and nobody notices it but the lighthouse
    agents.pause(one, five, change=DOWN)
    steps.append(train_in(agents.world(one, five, change=DOWN), one, five))

    six = start()
    for members in ((one,), (one, five, six), (one, six)):  # three worlds in no time
        last = agents.world(*members, change=DOWN)
    steps.append(train_in(last, one, six))

    assert steps == sorted(steps)
    all_steps = [step for worker in (*workers, five, six) for step in steps_of(worker)]
    check_all(all_steps)
    check_survivor(steps_of(one))
    assert steps_of(five)[0].step > steps[1], "it has got the state of a survivor"
