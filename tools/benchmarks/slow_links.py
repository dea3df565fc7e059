"""Measures training and sums of groups that a wide-area link connects."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from tools.benchmarks.options import json_option
from tools.benchmarks.processes import (
    START_TIMEOUT_S,
    Child,
    lighthouse_address,
    peer_python,
    program,
)
from tools.benchmarks.table import Column, Result, hand_over
from tools.benchmarks.wide_area import DEVICE, WideHost, wide_area

_NAMES = {
    "ddp": "DistributedDataParallel",
    "local_sgd": "LocalSGD",
    "diloco": "DiLoCo",
    "diloco-int8": "DiLoCo, int8",
    "streaming": "DiLoCo, 3 fragments, delay",
    "streaming-int8": "the same, int8",
    "decoupled": "DecoupledDiLoCo, 3 fragments",
    "decoupled-int8": "the same, int8",
    "public-diloco": "public release, DiLoCo",
    "public-streaming": "public release, 3 fragments, delay",
}
_PUBLIC = "public-"
_CHILDREN = "tools.benchmarks.children"
_COLORS = (
    *("#8a8f98", "#d9772b", "#3568b8", "#7fa6de", "#2f8f5b", "#8ccfa8", "#8b4fa8", "#c39bd3"),
    *("#b8433a", "#e39a93"),
)
_FORMATS = ("float32", "int8", "float8")
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "GLOO_SOCKET_IFNAME": DEVICE,
}
_COLUMNS = (
    Column("what", "what"),
    Column("groups", "groups", 0),
    Column("tokens_per_s", "tokens/s", 0),
    Column("share", "of no link", 3),
    Column("loss", "loss", 3),
    Column("wall_s", "s", 3),
    Column("speedup", "float32 = 1", 2),
    Column("error", "relative error", 4),
)
# What a group may take beyond its seconds: it starts torch, or waits for one that has ended.
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Step:
    """A step that ended ``at_s`` after the start, with ``tokens`` and their mean ``loss``."""

    at_s: float
    tokens: int
    loss: float


@dataclass(slots=True)
class Course:
    """What one group has trained, and the loss of its model on unseen text at the end."""

    steps: list[Step] = field(default_factory=list)
    unseen_loss: float | None = None


@contextmanager
def groups(
    hosts: Sequence[WideHost], num_groups: int, device_ms: float, peer: str | None = None
) -> Iterator[list[Child]]:
    """Groups on a host each, and a lighthouse on the last host.

    ``peer``: a Python that has the public release, whose groups and lighthouse they are then.
    """
    *places, last = hosts
    with ExitStack() as stack:
        lighthouse = stack.enter_context(Child(last.command(*_lighthouse(last, num_groups, peer))))
        address = lighthouse_address(lighthouse)
        children = []
        for number, place in enumerate(places[:num_groups]):
            flags = [
                f"--lighthouse={address}",
                f"--number={number}",
                f"--groups={num_groups}",
                f"--device-ms={device_ms}",
            ]
            command = program(f"{_CHILDREN}.slow_link_group", *flags)
            if peer is not None:
                flags.append(f"--host={place.address}")
                command = program(f"{_CHILDREN}.slow_link_public", *flags, python=peer)
            children.append(stack.enter_context(Child(place.command(*command), _ENVIRONMENT)))
        for child in children:
            assert child.read_line(START_TIMEOUT_S) == "ready"
        yield children


def _lighthouse(host: WideHost, min_replicas: int, peer: str | None) -> list[str]:
    """The command of a lighthouse of ours, or of the public release."""
    least = f"--min-replicas={min_replicas}"
    if peer is not None:
        module = f"{_CHILDREN}.lighthouse_public"
        return program(module, f"--host={host.address}", least, python=peer)
    bind = f"--bind={host.address}:0"
    return program("torchft_svc.lighthouse_server", bind, "--log-level=error", least)


def train(children: list[Child], algorithm: str, seconds: float) -> list[Course]:
    """Train until the first group has done so for ``seconds``: the others may wait for it then."""
    courses = [Course() for _ in children]
    for child in children:
        child.send(f"train {algorithm} {seconds}")
    deadline = time.monotonic() + seconds + _PATIENCE_S
    while not any(course.unseen_loss is not None for course in courses):
        for child, course in zip(children, courses, strict=True):
            if time.monotonic() > deadline:
                raise child.error("did not end")
            if child.wait_for_output(0.05) and not child.read_available():
                raise child.error("ended")
            for line in child.take_lines():
                word, *numbers = line.split()
                if word == "end":
                    course.unseen_loss = float(numbers[0])
                elif word == "step":
                    at_s, tokens, loss = numbers
                    course.steps.append(Step(float(at_s), int(tokens), float(loss)))
    return courses


def row_of(algorithm: str, courses: list[Course], seconds: float, alone: float) -> dict[str, Any]:
    """The row of one run; ``alone``: steps a second of a group that waits for nobody."""
    steps = [step for course in courses for step in course.steps if step.at_s <= seconds]
    losses = [course.unseen_loss for course in courses if course.unseen_loss is not None]
    return {
        "what": _NAMES[algorithm],
        "groups": len(courses),
        "tokens_per_s": sum(step.tokens for step in steps) / seconds,
        "share": len(steps) / seconds / len(courses) / alone,
        "loss": statistics.mean(losses),
        "curve": curve(courses),
    }


def curve(courses: list[Course], every_s: float = 1.0) -> list[tuple[float, float]]:
    """The mean loss of all groups' steps in each second, by the middle of the second."""
    by_second: dict[int, list[float]] = {}
    for course in courses:
        for step in course.steps:
            by_second.setdefault(int(step.at_s / every_s), []).append(step.loss)
    return [
        ((number + 0.5) * every_s, statistics.mean(losses))
        for number, losses in sorted(by_second.items())
    ]


def fastest_pace(courses: list[Course]) -> float:
    """Steps a second between which nothing was synchronized: the median distance of two steps."""
    gaps = [
        later.at_s - earlier.at_s
        for course in courses
        for earlier, later in itertools.pairwise(course.steps)
    ]
    return 1.0 / statistics.median(gaps)


def measure_sums(children: list[Child], megabytes: float, repeat: int) -> list[dict[str, Any]]:
    """Rows of an average over all groups in each number format, in the same processes."""
    rows: list[dict[str, Any]] = []
    for number_format in _FORMATS:
        for child in children:
            child.send(f"sum {number_format} {int(megabytes * 1e6) // 4} {repeat}")
        times, errors = [], []
        for child in children:
            while (line := child.read_line(_PATIENCE_S)) != "end":
                _, took_s, error = line.split()
                times.append(float(took_s))
                errors.append(float(error))
        wall_s = statistics.median(times)
        before = rows[0]["wall_s"] if rows else wall_s
        rows.append(
            {
                "what": f"average of {megabytes:g} MB, {number_format}",
                "groups": len(children),
                "wall_s": wall_s,
                "walls_s": times,
                "speedup": before / wall_s,
                "error": max(errors),
            }
        )
    return rows


def draw(rows: list[dict[str, Any]], title: str, picture: Path) -> None:
    """Draw the loss of each algorithm by the time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150)
    for row, color in zip(rows, _COLORS, strict=False):
        axes.plot(*zip(*row["curve"], strict=True), label=row["what"], color=color, lw=2)
    axes.set_xlabel("seconds")
    axes.set_ylabel("loss of a batch, mean of all groups")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)
    plt.close(figure)


@click.command(context_settings={"show_default": True})
@click.option("--groups", "counts", type=click.IntRange(2, 8), multiple=True, default=(2,),
              help="Groups that train together.")  # fmt: skip
@click.option("--mb-per-s", type=click.FloatRange(1.0), default=100.0, help="What a link carries.")
@click.option("--round-trip-ms", type=click.FloatRange(0.0), default=50.0, help="Between hosts.")
@click.option("--seconds", type=click.FloatRange(2.0), default=30.0, help="Training of each way.")
@click.option("--device-ms", type=click.FloatRange(0.0), default=100.0,
              help="What a step waits in addition to what it computes.")  # fmt: skip
@click.option("--algorithm", "algorithms", type=click.Choice(list(_NAMES)), multiple=True,
              help="Only these.  [default: all]")  # fmt: skip
@click.option("--sum-mb", type=click.FloatRange(0.0), default=64.0,
              help="Size of the sums in float32; 0: none.")  # fmt: skip
@click.option("--repeat", type=click.IntRange(1), default=3, help="Sums in each format.")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path),
              help="Draw the loss by the time, of the first number of groups.")  # fmt: skip
@json_option
def main(
    counts: tuple[int, ...],
    mb_per_s: float,
    round_trip_ms: float,
    seconds: float,
    device_ms: float,
    algorithms: tuple[str, ...],
    sum_mb: float,
    repeat: int,
    picture: Path | None,
    json_file: Path | None,
) -> None:
    """Training of groups that a slow link connects, by each algorithm, and sums in 8-bit numbers.

    Takes root: each group has a network namespace, and all their packets pass one process.
    """
    result = Result(
        name="slow_links",
        title=f"Groups connected by {mb_per_s:g} MB/s and a round trip of {round_trip_ms:g} ms",
        columns=_COLUMNS,
        settings={
            "mb_per_s": mb_per_s,
            "round_trip_ms": round_trip_ms,
            "seconds": seconds,
            "device_ms": device_ms,
        },
        notes=[
            f"each group trains 3.3 million parameters (13 MB) for {seconds:g} s; a step waits",
            f"{device_ms:g} ms, as for a device; synchronizations after 24 inner steps, delay 4",
            "of no link: the steps of all groups, compared with those of groups that never wait",
            "loss: on unseen text at the end (of DecoupledDiLoCo: of the merged weights)",
            "public release: as ours in one bucket; without TORCHFT_PEER_PYTHON it is left out",
            "sums: median of all groups' times",
        ],
    )
    peer = peer_python()
    with wide_area(max(counts) + 1, mb_per_s, round_trip_ms) as hosts:
        for num_groups in counts:
            if sum_mb:
                with groups(hosts, num_groups, device_ms) as children:
                    result.rows += measure_sums(children, sum_mb, repeat)
            runs: dict[str, list[Course]] = {}
            for algorithm in algorithms or _NAMES:
                is_public = algorithm.startswith(_PUBLIC)
                if is_public and peer is None:
                    continue
                with groups(hosts, num_groups, device_ms, peer if is_public else None) as children:
                    name = algorithm.removeprefix(_PUBLIC)
                    runs[algorithm] = train(children, name, seconds)
            alone = max(fastest_pace(courses) for courses in runs.values())
            rows = [row_of(name, courses, seconds, alone) for name, courses in runs.items()]
            result.rows += rows
            if picture is not None and num_groups == counts[0]:
                draw(rows, result.title, picture)
    hand_over(result, json_file)


if __name__ == "__main__":
    sys.exit(main())
