"""All metrics of lighthouse, manager and trainer: names, kinds, labels and help, as Prometheus has
them.

The tables in docs/observability.md, the alert rules and the dashboard are compared with this. It
needs no library: `torchft_svc.telemetry.exposition` makes a page of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class MetricKind(Enum):
    """A kind of metric, by Prometheus' name."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Program(Enum):
    """A program that has metrics, by its name in the label ``component``."""

    LIGHTHOUSE = "lighthouse"
    MANAGER = "manager"
    TRAINER = "trainer"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: ``programs`` have it with these ``labels``."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...]
    programs: tuple[Program, ...]

    @property
    def family(self) -> str:
        """The name without the ``_total`` at the end of a counter's samples."""
        return self.name.removesuffix("_total") if self.kind is MetricKind.COUNTER else self.name


# Waits for a quorum last from a millisecond to the minutes of a cold start.
DURATION_BUCKETS_S = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

_EVERY = (Program.LIGHTHOUSE, Program.MANAGER, Program.TRAINER)
_SERVICES = (Program.LIGHTHOUSE, Program.MANAGER)


def _of(
    program: Program | tuple[Program, ...], kind: MetricKind, name: str, help_: str, *labels: str
) -> Metric:
    programs = (program,) if isinstance(program, Program) else program
    return Metric(name, kind, help_, labels, programs)


# -- all programs ----------------------------------------------------------------------------------

BUILD_INFO = _of(
    _EVERY,
    MetricKind.GAUGE,
    "torchft_build_info",
    "Always 1; the labels name the version and the program.",
    "version",
    "component",
)
RPC_ERRORS = _of(
    _SERVICES,
    MetricKind.COUNTER,
    "torchft_rpc_errors_total",
    "Calls that this service has answered with an error.",
    "method",
    "code",
)

# -- the lighthouse --------------------------------------------------------------------------------

LEADER = _of(
    Program.LIGHTHOUSE,
    MetricKind.GAUGE,
    "torchft_leader",
    "1 if this lighthouse answers: without an election always, else while it is elected.",
)
SESSIONS = _of(
    Program.LIGHTHOUSE,
    MetricKind.GAUGE,
    "torchft_sessions",
    "Open streams of managers and of launchers' agents.",
    "peer",
)
JOBS = _of(
    Program.LIGHTHOUSE,
    MetricKind.GAUGE,
    "torchft_jobs",
    "Jobs that this lighthouse knows: with living groups, finished, or lost with all groups.",
    "state",
)
GROUPS = _of(
    Program.LIGHTHOUSE,
    MetricKind.GAUGE,
    "torchft_groups",
    "Living groups of a job; each counts in one state.",
    "job",
    "state",
)
SPARES = _of(
    Program.LIGHTHOUSE,
    MetricKind.GAUGE,
    "torchft_spares",
    "Prepared spares of a job: ready to take a place, or still starting.",
    "job",
    "state",
)
PLACES = _of(
    Program.LIGHTHOUSE,
    MetricKind.GAUGE,
    "torchft_places",
    "Places of the job that prepared spares fill when a group is lost.",
    "job",
)
GROUPS_EXPECTED = _of(
    Program.LIGHTHOUSE,
    MetricKind.GAUGE,
    "torchft_groups_expected",
    "Groups of the job's largest quorum, less those that left on purpose since.",
    "job",
)
MIN_GROUPS = _of(
    Program.LIGHTHOUSE,
    MetricKind.GAUGE,
    "torchft_min_groups",
    "The fewest groups that make a quorum of the job.",
    "job",
)
COMMITTED_STEP = _of(
    Program.LIGHTHOUSE,
    MetricKind.GAUGE,
    "torchft_committed_step",
    "The highest step that the job has certainly committed.",
    "job",
)
SINCE_COMMIT = _of(
    Program.LIGHTHOUSE,
    MetricKind.GAUGE,
    "torchft_seconds_since_commit",
    "Time since the job's highest step has grown.",
    "job",
)
GROUP_SILENCE = _of(
    Program.LIGHTHOUSE,
    MetricKind.GAUGE,
    "torchft_group_silence_seconds",
    "Time since the last sign of life of a living group.",
    "job",
    "group",
)
GROUP_OWN_WORK = _of(
    Program.LIGHTHOUSE,
    MetricKind.GAUGE,
    "torchft_group_own_work_seconds",
    "How long the group's own work takes in a step, without waits for others, by phase.",
    "job",
    "group",
    "phase",
)
GROUP_SLOWDOWN = _of(
    Program.LIGHTHOUSE,
    MetricKind.GAUGE,
    "torchft_group_slowdown_ratio",
    "The group's own work in a step, relative to what the label says.",
    "job",
    "group",
    "relative_to",
)
GROUPS_SLOW = _of(
    Program.LIGHTHOUSE,
    MetricKind.GAUGE,
    "torchft_groups_slow",
    "Living groups of a job that are slow, by the factor and the time of the settings.",
    "job",
)
QUORUM_DURATION = _of(
    Program.LIGHTHOUSE,
    MetricKind.HISTOGRAM,
    "torchft_quorum_duration_seconds",
    "Time from a job's first request for a quorum until the quorum was published.",
    "job",
)
QUORUM_CHANGES = _of(
    Program.LIGHTHOUSE,
    MetricKind.COUNTER,
    "torchft_quorum_changes_total",
    "Quorums of a job with another id than the one before, by the reason.",
    "job",
    "reason",
)
STEPS_DISCARDED = _of(
    Program.LIGHTHOUSE,
    MetricKind.COUNTER,
    "torchft_steps_discarded_total",
    "Steps that members of a quorum have discarded, by the cause.",
    "job",
    "cause",
)
HEALS = _of(
    Program.LIGHTHOUSE,
    MetricKind.COUNTER,
    "torchft_heals_total",
    "Heals of groups that were behind, by the outcome.",
    "job",
    "outcome",
)
HEAL_BYTES = _of(
    Program.LIGHTHOUSE,
    MetricKind.COUNTER,
    "torchft_heal_bytes_total",
    "Bytes of state that healed groups have received.",
    "job",
)
STATE_DIFFERENCES = _of(
    Program.LIGHTHOUSE,
    MetricKind.COUNTER,
    "torchft_state_differences_total",
    "State checks that have found the groups of a job to differ.",
    "job",
)
COPY_HOLDERS = _of(
    Program.LIGHTHOUSE,
    MetricKind.GAUGE,
    "torchft_copy_holders",
    "Processes that hold copies of the job's states, or wait for one.",
    "job",
)
COPY_STEP = _of(
    Program.LIGHTHOUSE,
    MetricKind.GAUGE,
    "torchft_copy_step",
    "The step of the newest state that is held as a whole; 0: none is.",
    "job",
)
SINCE_COPY = _of(
    Program.LIGHTHOUSE,
    MetricKind.GAUGE,
    "torchft_seconds_since_copy",
    "Time since a newer state of the job was held as a whole.",
    "job",
)
GOODPUT = _of(
    Program.LIGHTHOUSE,
    MetricKind.GAUGE,
    "torchft_goodput_ratio",
    "Part of the job's time so far that ended in committed steps.",
    "job",
)
LOST = _of(
    Program.LIGHTHOUSE,
    MetricKind.COUNTER,
    "torchft_lost_seconds_total",
    "Time of the job that did not end in committed steps, by the cause.",
    "job",
    "cause",
)
RUN_NODES = _of(
    Program.LIGHTHOUSE,
    MetricKind.GAUGE,
    "torchft_run_nodes",
    "Nodes of a launched run, by what their workers do.",
    "run",
    "state",
)
RUN_NODES_EXPECTED = _of(
    Program.LIGHTHOUSE,
    MetricKind.GAUGE,
    "torchft_run_nodes_expected",
    "The fewest nodes with which a launched run works.",
    "run",
)
RUN_RESTARTS = _of(
    Program.LIGHTHOUSE,
    MetricKind.COUNTER,
    "torchft_run_restarts_total",
    "Worlds of a launched run after its first one, by the cause.",
    "run",
    "cause",
)

# -- a manager -------------------------------------------------------------------------------------

MANAGER_CONNECTED = _of(
    Program.MANAGER,
    MetricKind.GAUGE,
    "torchft_manager_connected",
    "1 while this manager has a connection to a lighthouse that answers.",
    "job",
    "group",
)
MANAGER_WORKERS = _of(
    Program.MANAGER,
    MetricKind.GAUGE,
    "torchft_manager_workers",
    "Workers of the group whose streams to this manager are open.",
    "job",
    "group",
)
MANAGER_STEP = _of(
    Program.MANAGER,
    MetricKind.GAUGE,
    "torchft_manager_step",
    "The step that all workers of the group have reached.",
    "job",
    "group",
)
MANAGER_QUORUMS = _of(
    Program.MANAGER,
    MetricKind.COUNTER,
    "torchft_manager_quorums_total",
    "Requests for a quorum of the group, by the outcome.",
    "job",
    "group",
    "outcome",
)
MANAGER_QUORUM_DURATION = _of(
    Program.MANAGER,
    MetricKind.HISTOGRAM,
    "torchft_manager_quorum_duration_seconds",
    "Time from the group's request for a quorum until the lighthouse's answer.",
    "job",
    "group",
)

# -- a trainer -------------------------------------------------------------------------------------

PHASE_SECONDS = _of(
    Program.TRAINER,
    MetricKind.COUNTER,
    "torchft_phase_seconds_total",
    "What the time of the training thread was spent on, up to the end of its last step.",
    "job",
    "group",
    "rank",
    "phase",
)
TRAINER_STEP = _of(
    Program.TRAINER,
    MetricKind.GAUGE,
    "torchft_trainer_step",
    "The number of updates in the weights of this worker.",
    "job",
    "group",
    "rank",
)
TRAINER_STEPS = _of(
    Program.TRAINER,
    MetricKind.COUNTER,
    "torchft_trainer_steps_total",
    "Steps of this worker that have ended, by the outcome.",
    "job",
    "group",
    "rank",
    "outcome",
)
TRAINER_GROUPS = _of(
    Program.TRAINER,
    MetricKind.GAUGE,
    "torchft_trainer_contributing_groups",
    "Groups that contribute gradients to the present step.",
    "job",
    "group",
    "rank",
)
TRAINER_HEALS = _of(
    Program.TRAINER,
    MetricKind.COUNTER,
    "torchft_trainer_heals_total",
    "States that this worker has received from another group.",
    "job",
    "group",
    "rank",
)
TRAINER_HEAL_BYTES = _of(
    Program.TRAINER,
    MetricKind.COUNTER,
    "torchft_trainer_heal_bytes_total",
    "Bytes of the tensors in the states that this worker has received.",
    "job",
    "group",
    "rank",
)

METRICS: tuple[Metric, ...] = tuple(
    each for each in list(globals().values()) if isinstance(each, Metric)
)
