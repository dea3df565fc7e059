"""``torchft-run``: torchrun with restart policies. All of its arguments, and a few more.

``python -m torchft_svc.elastic.run`` is the same. Without ``--restart-policy`` it does what
torchrun does. Each argument can be given in the environment, too (``PET_RESTART_POLICY=soft``).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import sys
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.argparse_util import check_env as flag_or_environment
from torch.distributed.argparse_util import env as from_argument_or_environment
from torch.distributed.elastic.multiprocessing import SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.rendezvous import RendezvousError

from torchft_svc import env
from torchft_svc.core.launch.replica_groups import GroupsRules
from torchft_svc.core.launch.restart import RestartPolicy
from torchft_svc.core.launch.world import FAILURE_WINDOW_S, MAX_FAILURES
from torchft_svc.elastic.launcher import (
    FinalChildFailedError,
    LaunchConfig,
    elastic_launch,
    from_torch,
)
from torchft_svc.elastic.policy import MAX_SOFT_FAILURES, STOPPED_TIMEOUT_S
from torchft_svc.elastic.rendezvous.config import BACKEND, EXIT_BARRIERS
from torchft_svc.elastic.replica_groups import GroupsConfig, command_of_group, run_replica_groups
from torchft_svc.elastic.warm_start import DEFAULT_PRELOAD, preload_list
from torchft_svc.elastic.workers import check_program
from torchft_svc.errors import ConfigError, PeerError, UsageError
from torchft_svc.host.exit_verdict import final_exit_code, is_final
from torchft_svc.host.health_check import DEFAULT_TIMEOUT_S
from torchft_svc.host.line_writer import READER_PATIENCE_S, unblocked_output
from torchft_svc.host.log_format import Speaker, make_formatter
from torchft_svc.host.log_limit import LimitedLog, level_number
from torchft_svc.telemetry.exporting import exporting

_DEFAULT_MASTER_PORT = 29500  # torchrun's
_USAGE = 2  # argparse's
_SHUTDOWN_S = "30"  # torch's
_POLICIES = tuple(policy.value for policy in RestartPolicy)


def get_args_parser() -> ArgumentParser:
    """torchrun's parser with our arguments."""
    parser = torchrun.get_args_parser()
    parser.prog = "torchft-run"
    parser.description = "torchrun with restart policies: surviving workers need not be restarted."
    parser.usage = "torchft-run [options] script [arguments]; --help lists the options"
    for name in ("rdzv_backend", "node_rank"):
        if not env.is_set(f"PET_{name.upper()}"):
            parser.set_defaults(**{name: None})  # to distinguish it from a default that is given
    _add_groups_arguments(parser)
    _add_restart_arguments(parser)
    _add_failure_arguments(parser)
    _add_health_arguments(parser)
    return parser


def _add_groups_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("replica groups of a job that survives them")
    _add(
        group,
        "--replica-groups",
        "Run so many replica groups of one job on this machine (default 1), each with "
        "--nproc-per-node workers that have a Manager; one that fails is started again, at most "
        "--max-restarts times.",
        type=int,
        default=1,
        metavar="NUMBER",
    )
    _add(
        group,
        "--spares",
        "Let so many more groups stand by (default 0): one of them takes the place of a group that "
        "is lost, which is started again as a spare.",
        type=int,
        default=0,
        metavar="NUMBER",
    )


def _add_restart_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("restart policies")
    _add(
        group,
        "--restart-policy",
        "What happens to the workers that survive a change: they are restarted (hard, the "
        "default), or sent their new world. With soft, a failed worker's node starts its workers "
        "again; with soft-no-replace it does not, with soft-replace only that worker.",
        default=RestartPolicy.HARD.value,
        metavar="{" + ",".join(_POLICIES) + "}",
    )
    _add(
        group,
        "--soft-ready-timeout",
        "A worker that does not reach a new world in this time has failed (default 300); 0: "
        "it may take however long, for programs that treat the states by their own logic.",
        type=float,
        default=300.0,
        metavar="SECONDS",
    )
    _add(
        group,
        "--stopped-worker-timeout",
        "With a soft policy: a worker that is stopped for so long (SIGSTOP), not by a debugger, is "
        f"killed, which is a failure (default {STOPPED_TIMEOUT_S:g}); 0: it may be for ever.",
        type=float,
        default=STOPPED_TIMEOUT_S,
        metavar="SECONDS",
    )
    _add(
        group,
        "--exit-barrier",
        "Whether a node whose workers have finished waits for the nodes that are alive (the "
        "default), or for all, also those that are lost. Only a lighthouse knows who is alive.",
        default=EXIT_BARRIERS[0],
        metavar="{" + ",".join(EXIT_BARRIERS) + "}",
    )
    _add(
        group,
        "--exit-barrier-timeout",
        "How long a node whose workers have finished waits for the others (default 300).",
        type=float,
        default=300.0,
        metavar="SECONDS",
    )
    _add(
        group,
        "--warm-start",
        "With a soft policy: fork the workers that are started anew from a process that has "
        "imported the modules of --warm-start-preload. They must neither use CUDA nor start "
        "threads. For Python scripts and modules, not with --no-python.",
        action=flag_or_environment,
    )
    _add(
        group,
        "--warm-start-preload",
        "What --warm-start imports, separated by commas (default torch).",
        default=",".join(DEFAULT_PRELOAD),
        metavar="MODULES",
    )


def _add_health_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("health of this node")
    _add(
        group,
        "--health-check",
        "A command that runs before this node joins, and before failed workers are started again; "
        "with another status than 0 the node does not join (default: TORCHFT_HEALTH_CHECK).",
        default="",
        metavar="COMMAND",
    )
    _add(
        group,
        "--health-check-timeout",
        f"How long it may take (default TORCHFT_HEALTH_CHECK_TIMEOUT_SEC, {DEFAULT_TIMEOUT_S:g}).",
        type=float,
        metavar="SECONDS",
    )


def _add_failure_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("failures that do not end")
    number = {"type": int, "metavar": "NUMBER"}
    _add(
        group,
        "--max-soft-failures",
        "With soft-replace: after more failures than this within --failure-window, all workers "
        f"of a node are started anew (default {MAX_SOFT_FAILURES}).",
        default=MAX_SOFT_FAILURES,
        **number,
    )
    _add(
        group,
        "--max-node-failures",
        "A node that fails more often than this within --failure-window is excluded from the run "
        "for as long (default: it is not; needs a lighthouse).",
        **number,
    )
    _add(
        group,
        "--max-run-failures",
        "When all nodes together fail more often than this within --failure-window, the run ends "
        "with an error (default: it does not; needs a lighthouse).",
        **number,
    )
    _add(
        group,
        "--max-restarts-without-progress",
        "When so many restarts in a row have not got beyond the step that workers had committed "
        "before, the run ends with a status with which no scheduler starts it again (default: "
        "it does not). Workers with a Manager report their steps, others by "
        "torchft_svc.elastic.report_progress().",
        **number,
    )
    _add(
        group,
        "--failure-window",
        f"For how long a failure counts (default {FAILURE_WINDOW_S:g}).",
        type=float,
        default=FAILURE_WINDOW_S,
        metavar="SECONDS",
    )


def _add(group: Any, flag: str, text: str, **more: Any) -> None:
    """Add a flag in both spellings, as torchrun has them, that the environment may set."""
    action = more.pop("action", from_argument_or_environment)
    spellings = dict.fromkeys((flag, "--" + flag[2:].replace("-", "_")))
    group.add_argument(*spellings, action=action, help=text, **more)


def parse_args(args: Sequence[str] | None = None) -> Namespace:
    """Parse the arguments, and check what torchrun leaves to whoever uses the values.

    Raises:
        ConfigError: a value that cannot work.
    """
    try:
        parsed = get_args_parser().parse_args(args)
    except SystemExit as end:  # arguments that argparse refuses
        if end.code == _USAGE:
            raise SystemExit(final_exit_code()) from None
        raise
    if parsed.restart_policy not in _POLICIES:
        raise ConfigError("--restart-policy", parsed.restart_policy, f"use one of {_either()}")
    if parsed.exit_barrier not in EXIT_BARRIERS:
        raise ConfigError("--exit-barrier", parsed.exit_barrier, "use alive or all")
    _check_nodes(parsed.nnodes)
    _check_numbers(parsed)
    for flag, streams in (("--redirects", parsed.redirects), ("--tee", parsed.tee)):
        try:
            Std.from_str(streams)
        except ValueError:
            raise ConfigError(flag, streams, "use 0 to 3, or 0:1,1:3 for some ranks") from None
    _check_script(parsed)
    if _runs_groups(parsed):
        _check_groups(parsed)
    numa_binding = getattr(parsed, "numa_binding", None)  # torch has it since 2.9
    if numa_binding is not None and not torch.cuda.is_available():
        raise ConfigError(
            "--numa-binding",
            numa_binding,
            "it binds workers to the processors near GPUs, and torch finds none: leave it out",
        )
    return parsed


def _check_numbers(parsed: Namespace) -> None:
    for name in ("soft_ready_timeout", "stopped_worker_timeout", "exit_barrier_timeout"):
        value = getattr(parsed, name)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(_flag(name), value, "use a finite number of seconds, 0 or more")
    for name in ("monitor_interval", "failure_window"):
        if not (math.isfinite(getattr(parsed, name)) and getattr(parsed, name) > 0):
            raise ConfigError(_flag(name), getattr(parsed, name), "use more than 0 seconds")
    if parsed.max_restarts < 0:
        raise ConfigError("--max-restarts", parsed.max_restarts, "use 0 or more")
    for name in ("max_soft_failures", "max_run_failures", "max_node_failures"):
        limit = getattr(parsed, name)
        if limit is not None and not 0 <= limit <= MAX_FAILURES:
            raise ConfigError(_flag(name), limit, f"use 0 to {MAX_FAILURES}")
    limit = parsed.max_restarts_without_progress
    if limit is not None and limit < 1:
        raise ConfigError("--max-restarts-without-progress", limit, "use 1 or more")
    if parsed.nproc_per_node.lstrip("+-").isdigit() and int(parsed.nproc_per_node) < 1:
        raise ConfigError("--nproc-per-node", parsed.nproc_per_node, "use 1 or more")


def _runs_groups(parsed: Namespace) -> bool:
    """Whether the workers are several groups of a job, or stand by for one."""
    return bool(parsed.replica_groups != 1 or parsed.spares != 0)


def _check_groups(parsed: Namespace) -> None:
    """Refuse what cannot work together with replica groups, each of which has its own world."""
    _groups_rules(parsed)  # refuses numbers that cannot work
    if not parsed.nproc_per_node.isdigit():
        reason = "use a number: that of the workers of each replica group"
        raise ConfigError("--nproc-per-node", parsed.nproc_per_node, reason)
    if parsed.restart_policy != RestartPolicy.HARD.value:
        reason = "a lost worker ends its replica group, which is started again as a whole"
        raise ConfigError("--restart-policy", parsed.restart_policy, reason)
    if parsed.nnodes.strip() not in ("1", "1:1"):
        reason = (
            "a replica group is on one machine: start this launcher on each, with one "
            "TORCHFT_LIGHTHOUSE for all and a REPLICA_GROUP_ID of its own"
        )
        raise ConfigError("--nnodes", parsed.nnodes, reason)
    for name, default in _OF_ONE_WORLD.items():
        if getattr(parsed, name) not in (None, default):
            reason = "it is for one world of workers, and each replica group has its own"
            raise ConfigError(_flag(name), getattr(parsed, name), f"{reason}: leave it out")
    if env.Environment().is_spare:
        reason = "--replica-groups and --spares decide which groups stand by: leave it out"
        raise ConfigError("TORCHFT_SPARE", "1", reason)


# Arguments of a single world, and what they are if nobody gives them.
_OF_ONE_WORLD: dict[str, str | None] = {
    "rdzv_backend": None,
    "rdzv_endpoint": "",
    "rdzv_id": "none",
    "rdzv_conf": "",
    "node_rank": None,
    "master_addr": "127.0.0.1",
    "master_port": None,
    "max_node_failures": None,
    "max_run_failures": None,
    "max_restarts_without_progress": None,
}


def _groups_rules(parsed: Namespace) -> GroupsRules:
    return GroupsRules(
        num_groups=parsed.replica_groups,
        num_spares=parsed.spares,
        max_restarts=parsed.max_restarts,
        final_status=final_exit_code(),
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def config_from_args(
    args: Namespace,
) -> tuple[LaunchConfig, Callable[..., Any] | str, list[str]]:
    """What to launch, from the arguments.

    Raises:
        ConfigError: a value that cannot work.
    """
    policy = RestartPolicy(args.restart_policy)
    _choose_backend(args, policy)
    node_rank = args.node_rank
    if node_rank is None or args.rdzv_backend == BACKEND:
        args.node_rank = 0  # torchrun warns of any other, which would have no effect
    if args.rdzv_backend == BACKEND:
        del args.master_addr  # the same
    try:
        config, entrypoint, arguments = torchrun.config_from_args(args)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        raise UsageError(str(error)) from error
    if args.rdzv_backend == BACKEND and node_rank is not None:
        config.rdzv_configs["rank"] = node_rank
    ours = from_torch(
        config,
        restart_policy=policy,
        soft_ready_timeout=args.soft_ready_timeout,
        stopped_worker_timeout=args.stopped_worker_timeout,
        max_soft_failures=args.max_soft_failures,
        failure_window=args.failure_window,
        max_run_failures=args.max_run_failures,
        max_node_failures=args.max_node_failures,
        max_restarts_without_progress=args.max_restarts_without_progress,
        health_check=args.health_check or env.Environment().health_check or "",
        health_check_timeout=_health_check_timeout(args.health_check_timeout),
        exit_barrier=args.exit_barrier,
        exit_barrier_timeout=args.exit_barrier_timeout,
        warm_start=args.warm_start,
        warm_start_preload=preload_list(args.warm_start_preload),
    )
    return ours, entrypoint, arguments


def _health_check_timeout(given: float | None) -> float:
    from_environment = env.Environment().health_check_timeout_s
    return given if given is not None else from_environment or DEFAULT_TIMEOUT_S


@record
def run(args: Namespace) -> None:
    """Launch what the arguments say, and wait for its end."""
    config, entrypoint, arguments = config_from_args(args)
    elastic_launch(config, entrypoint)(*arguments)


def _run_groups(parsed: Namespace, arguments: Sequence[str]) -> int:
    """Run several replica groups, each by a launcher of its own; returns the exit status."""
    config_from_args(parsed)  # refuses what the launcher of each group would refuse
    timeout_s = getattr(parsed, "shutdown_timeout", None)  # torch has it since 2.9
    if timeout_s is None:
        timeout_s = float(env.value_of("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_S))
    groups = GroupsConfig(
        rules=_groups_rules(parsed),
        command=command_of_group(arguments, 1 + len(parsed.training_script_args)),
        num_workers=int(parsed.nproc_per_node),
        shutdown_timeout_s=timeout_s,
    )
    return run_replica_groups(groups)


def main(args: Sequence[str] | None = None) -> None:
    """The command. Failed workers and signals end it as they end torchrun.

    Where a restart of this launcher cannot mend the error, its exit status says so.
    """
    arguments = sys.argv[1:] if args is None else args
    try:
        parsed = parse_args(arguments)
        with _logging_to_stderr(parsed.rdzv_id):
            if _runs_groups(parsed):
                sys.exit(_run_groups(parsed, arguments))
            run(parsed)
    except (UsageError, PeerError, RendezvousError, DistError) as error:
        is_usage = isinstance(error, UsageError)
        _end(error, final_exit_code() if is_usage or is_final(error) else 1)
    except SignalException as end:  # torchrun shows a traceback, which names nothing else
        print(f"torchft-run: ended by {end.sigval.name}", file=sys.stderr)
        sys.exit(1)
    except FinalChildFailedError as error:
        sys.excepthook(type(error), error, error.__traceback__)  # as torchrun shows it
        sys.exit(final_exit_code())


@contextlib.contextmanager
def _logging_to_stderr(run_id: str) -> Iterator[None]:
    """Log as services do, unless the program around this has its own configuration.

    Whoever stops reading the output does not stop the agent: torch's lines are queued, too.
    """
    logger = logging.getLogger("torchft_svc")
    level = level_number(env.Environment().log_level or "info")
    log_format = env.Environment().log_format
    with contextlib.ExitStack() as stack:
        original = sys.stderr
        errors = stack.enter_context(unblocked_output(patience_s=READER_PATIENCE_S))
        for name in ("torch", "torch.distributed"):
            for handler in logging.getLogger(name).handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is original:
                    handler.setStream(sys.stderr)
                    stack.callback(handler.setStream, original)
        ours = LimitedLog(errors)
        ours.setFormatter(make_formatter(log_format, Speaker("agent", {"run": run_id})))
        stack.callback(logger.setLevel, logger.level)
        stack.callback(ours.close)
        stack.callback(logger.removeHandler, ours)
        logger.addHandler(ours)
        logger.setLevel(level)
        stack.enter_context(exporting("run", {"run": run_id}))
        yield


def _end(error: Exception, status: int) -> None:
    sentence = " ".join(str(error).split()) or type(error).__name__
    shown, has_inner, _ = sentence.partition(" See inner exception for details.")
    if has_inner and error.__cause__ is not None:  # of torch's
        sentence = f"{shown} {' '.join(str(error.__cause__).split())}"
    print(f"torchft-run: error: {sentence}", file=sys.stderr)
    sys.exit(status)


def _choose_backend(args: Namespace, policy: RestartPolicy) -> None:
    """Choose as torchrun does; soft policies use a lighthouse unless the user names another."""
    if args.standalone:
        args.rdzv_backend = BACKEND if policy.is_soft else "c10d"
        args.rdzv_endpoint = "" if policy.is_soft else "localhost:0"
        if policy.is_soft and torchrun.parse_min_max_nnodes(args.nnodes)[0] == 1:
            args.nnodes = "1"  # no other node knows its own lighthouse
        args.rdzv_id = str(uuid.uuid4())
    elif args.rdzv_backend is None and policy.is_soft:
        args.rdzv_backend = BACKEND
    elif args.rdzv_backend in (None, "static"):
        args.rdzv_backend = "static"
        _, max_nodes = torchrun.parse_min_max_nnodes(args.nnodes)
        if not args.rdzv_endpoint and args.master_port is None and max_nodes == 1:
            args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"
            args.rdzv_id = str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = _DEFAULT_MASTER_PORT


def _check_nodes(text: str) -> None:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if found is None:
        raise ConfigError("--nnodes", text, "use a number of nodes, or min:max")
    least, most = int(found[1]), int(found[2] or found[1])
    if not 1 <= least <= most:
        raise ConfigError("--nnodes", text, "1 <= min <= max is needed")


def _check_script(args: Namespace) -> None:
    """A script that no worker can read would fail once for each worker and restart."""
    script = args.training_script
    if args.no_python:
        check_program(script)
    if args.module or args.no_python or env.is_set("PYTHON_EXEC") or "$" in script:
        return
    if not os.path.exists(script):
        raise ConfigError("script", script, "there is no such file")
    if not os.access(script, os.R_OK):
        raise ConfigError("script", script, "it cannot be read")
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise ConfigError("script", script, "there is no __main__.py in this folder")


def _either() -> str:
    return ", ".join(_POLICIES[:-1]) + " or " + _POLICIES[-1]


if __name__ == "__main__":
    main()
