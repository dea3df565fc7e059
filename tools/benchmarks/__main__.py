"""Runs all benchmarks, one after the other: tables on the terminal, JSON in ``results/``."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from tools.benchmarks.processes import ROOT, program


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Flags for a look (a minute or two each), and for figures worth writing down."""

    name: str
    quick: tuple[str, ...]
    full: tuple[str, ...]
    quick_timeout_s: float = 600.0
    full_timeout_s: float = 3600.0


BENCHMARKS = (
    Benchmark("step_time", ("--steps=20", "--blocks=4"), ("--steps=50", "--blocks=12")),
    Benchmark("reading", ("--steps=30", "--blocks=3"), ()),
    Benchmark("state_checks", ("--steps=50", "--every=50", "--blocks=3"), ()),
    Benchmark("observing", ("--steps=50", "--blocks=3"), ()),
    Benchmark("recovery", ("--kills=3", "--peer-kills=1"), ("--kills=20", "--peer-kills=10")),
    Benchmark("lost_step", ("--kills=2",), ("--kills=20",)),
    Benchmark("start", ("--starts=3",), ("--starts=11",)),
    Benchmark("quorum_rounds", ("--seconds=0.5", "--blocks=2"), ("--seconds=2", "--blocks=6")),
    Benchmark("fleet", ("--groups=100", "--seconds=3"), ("--groups=100", "--groups=1000")),
    Benchmark("dashboard", ("--groups=100", "--seconds=3", "--repeat=1"), ("--repeat=9",)),
    Benchmark(
        "meeting",
        ("--members=100", "--members=1000", "--processes=8", "--repeat=3"),
        ("--repeat=9",),
    ),
    Benchmark(
        "under_failures",
        ("--every=15", "--steps=400", "--calm-steps=100", "--seeds=1", "--checkpoint-every=40"),
        ("--picture=results/under-failures.png",),
    ),
    Benchmark("decoupled", ("--seconds=40",), ("--seconds=240",)),
    Benchmark("isolation", ("--blocks=2",), ("--blocks=8",)),
    Benchmark(
        "striping",
        ("--gb=0.25", "--repeat=1", "--mb-per-s=40"),
        ("--gb=2", "--repeat=5", "--mb-per-s=100"),
    ),
    Benchmark("stall", ("--gb=0.25", "--mb-per-s=40"), ("--gb=2", "--mb-per-s=100")),
    Benchmark("catch_up", ("--gb=0.25",), ("--gb=2",)),
    Benchmark("buddy", ("--gb=0.25", "--blocks=2", "--step-s=0.2"), ("--gb=2",)),
    Benchmark("prepared_spares", ("--gb=0.2",), ("--gb=2",)),
    Benchmark(
        "launcher",
        ("--kills=2", "--init-kills=1"),
        ("--kills=20", "--init-kills=5"),
        1800.0,
        3 * 3600.0,
    ),
    Benchmark("replica_groups", ("--kills=1",), ("--kills=3",), 1200.0),
    Benchmark("trainer", ("--kills=2",), ("--kills=20",)),
    Benchmark(
        "slow_links",
        ("--seconds=5", "--repeat=1", "--sum-mb=16"),
        ("--groups=2", "--groups=4", "--picture=results/slow-links.png"),
    ),
    Benchmark("memory", ("--repeat=1",), ("--repeat=9",)),
    Benchmark("healing", ("--gb=0.5", "--repeat=3"), ("--gb=2", "--repeat=7")),
)
_NAMES = [benchmark.name for benchmark in BENCHMARKS]


@click.command(context_settings={"show_default": True})
@click.option("--full", is_flag=True, help="More repeats, for published figures.")
@click.option("--only", type=click.Choice(_NAMES), multiple=True, help="Run only this benchmark.")
@click.option("--results", type=click.Path(file_okay=False, path_type=Path),
              default=ROOT / "results", show_default="results",
              help="Folder for the JSON files.")  # fmt: skip
def main(full: bool, only: tuple[str, ...], results: Path) -> None:
    """Run all benchmarks, ours beside plain PyTorch and, where there is one, the public release.

    TORCHFT_PEER_PYTHON names a Python that has the public release; without it, its rows are left
    out.
    """
    results = results.resolve()
    failed = []
    for benchmark in BENCHMARKS:
        if only and benchmark.name not in only:
            continue
        click.echo(f"== {benchmark.name}")
        flags = benchmark.full if full else benchmark.quick
        json_file = results / f"{benchmark.name}.json"
        command = program(f"tools.benchmarks.{benchmark.name}", *flags, f"--json={json_file}")
        limit_s = benchmark.full_timeout_s if full else benchmark.quick_timeout_s
        try:
            status: object = subprocess.run(
                command, cwd=ROOT, timeout=limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"no end within {limit_s:g} s"
        if status:
            failed.append(f"{benchmark.name} ({status})")
    if failed:
        click.echo(f"failed: {', '.join(failed)}", err=True)
        sys.exit(1)
    click.echo(f"JSON: {results}")


if __name__ == "__main__":
    main()
