"""The public trainer: trains a model on several workers, and survives the loss of any of them."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Literal

from torchft_svc.client.runtime.trainer_log import speak_on_stderr
from torchft_svc.env import Environment
from torchft_svc.errors import CheckpointError, ConfigError
from torchft_svc.host.exit_verdict import give_verdicts
from torchft_svc.host.log_format import Speaker
from torchft_svc.trainer.backend import Backend
from torchft_svc.trainer.checkpoint import (
    Checkpoint,
    CheckpointStore,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from torchft_svc.trainer.config import (
    AUTO,
    DEFAULT_CHECKPOINT_DIR,
    TrainerConfig,
    budget,
    check_info,
    check_num_steps,
    check_options,
)
from torchft_svc.trainer.driver import RunObserver, RunParts, TrainerDriver, known_state
from torchft_svc.trainer.held_state import pair_models
from torchft_svc.trainer.history import RunHistory
from torchft_svc.trainer.job import DEFAULT_JOIN_TIMEOUT_S, DEFAULT_TIMEOUT_S
from torchft_svc.trainer.local import LocalBackend, check_resources
from torchft_svc.trainer.messages import FaultTolerance, Position
from torchft_svc.trainer.picture import draw_run
from torchft_svc.trainer.progress_bar import ProgressBar, progress_bar
from torchft_svc.trainer.results import reduced
from torchft_svc.trainer.retry.budget import RetryBudget
from torchft_svc.trainer.retry.initial_state import KnownState, StateSource
from torchft_svc.trainer.state import (
    TrainingState,
    decode_state,
    encode_state,
    from_tree,
    to_tree,
)
from torchft_svc.trainer.tasks import GiveStateTask, TrainTask, ValidateTask

log = logging.getLogger(__name__)

# As RaySGD's trainer had it.
DEFAULT_MAX_RETRIES = 3
# Imported where it is needed.
_RAY_MODULE = "torchft_svc.trainer.ray_backend"
# `Trainer.shutdown` waits so long for another thread to leave the trainer.
_STOP_S = 20.0


class Trainer:
    """Trains on ``num_workers`` workers, and continues when some of them, or all, are lost::

        trainer = Trainer(
            model_creator=lambda config: nn.Linear(64, 10),
            data_creator=lambda config: dataset,
            optimizer_creator=lambda model, config: torch.optim.Adam(model.parameters()),
            loss_creator=nn.CrossEntropyLoss,
            config={"batch_size": 32},
            num_workers=2,
        )
        for _ in range(10):
            print(trainer.train(max_retries=3, checkpoint="auto"))
        trainer.shutdown()

    Args:
        train_fn: ``train_fn(context)``, a loop of the user's own; see `TrainContext`. Otherwise:
        model_creator, data_creator, optimizer_creator, loss_creator, scheduler_creator: what makes
            the model, the data and so on, each called with ``config`` as its last argument; see
            `TrainingProgram`.
        batch_loss: ``batch_loss(model, batch, info)`` returns the loss of a batch, in place of that
            of ``loss_creator``.
        scheduler_step: whether the scheduler moves after each pass or after each step.
        setup: ``setup(config)``, called in each worker before anything else is made.
        config: for all of these functions.
        num_workers: how many are wanted. With resources for fewer, at least ``min_workers``, the
            trainer trains with these, and grows when there are more.
        spares: how many more workers stand by with their model made, with ``per-step``: one takes
            the place of a lost worker at once, and another one is started to stand by. They need
            ``resources_per_worker``, too. Not with Ray.
        min_workers: the fewest that train.
        backend: ``local`` (processes of this machine), ``ray``, or a `Backend`, which the trainer
            closes.
        resources_per_worker: such as ``{"CPU": 1, "GPU": 1}``.
        fault_tolerance: ``restart``: after a loss all workers are started anew, from the state of
            one that lived, so that no step is lost, or from the last checkpoint. Works with any
            model, at the speed of torch's DistributedDataParallel. ``per-step``: a lost worker
            costs the others one step at most, and is replaced while they train; only if fewer than
            ``min_workers`` are left, all are started anew.
        checkpoint_dir: for ``checkpoint="auto"``: a folder, or a URL of fsspec; all workers reach
            it (default: ``torchft-checkpoints`` in the working directory).
        checkpoint_every: steps, or a timedelta, between checkpoints inside of a pass (default:
            there is one before each pass only).
        keep_last: how many checkpoints are kept.
        resume: ``auto``: begin with the newest good checkpoint of ``checkpoint_dir``, if there is
            one, for instance after the trainer itself was lost.
        batch_size: samples of one worker in a step.
        seed: of the order of data, the initial weights, and the random numbers of each step.
        use_gpu: whether workers train on GPUs (default: if ``resources_per_worker`` has one).
        num_threads: of torch in each worker (default: torch's).
        ddp_args: more arguments of ``DistributedDataParallel``.
        run_name: different for each run at the same time on the same lighthouse.
        heartbeat_timeout_s: a worker that is silent for so long is lost.
        start_timeout_s: the longest that a worker may take to start, and to join the others.
        timeout_s: the longest that a collective may take.
        join_timeout_s: the longest that all workers may take to meet.
        first_pause_s, max_pause_s: without resources, the trainer looks again after a pause, which
            doubles from the first to the longest one.
        resources_timeout_s: a wait for resources that takes longer costs another retry.
        grow_every_s: how often, at most, a report leads to a look for resources of missing workers.
        max_restarts_without_progress: when so many restarts in a row have not got beyond the last
            step, `train` ends with a `TrainingFailed` that is final, whatever retries are left
            (default: never).
        show_progress: a progress bar (default: on a terminal).

    With ``TORCHFT_DO_NOT_REQUEUE_EXIT_CODE`` an uncaught error that a restart of the program cannot
    mend ends it with that status.

    Raises:
        ConfigError: a setting that cannot work.
    """

    def __init__(
        self,
        train_fn: Callable[[Any], Any] | None = None,
        *,
        model_creator: Callable[..., Any] | None = None,
        data_creator: Callable[..., Any] | None = None,
        optimizer_creator: Callable[..., Any] | None = None,
        loss_creator: Callable[..., Any] | None = None,
        scheduler_creator: Callable[..., Any] | None = None,
        batch_loss: Callable[..., Any] | None = None,
        scheduler_step: Literal["epoch", "step"] = "epoch",
        setup: Callable[[Mapping[str, Any]], None] | None = None,
        config: Mapping[str, Any] | None = None,
        num_workers: int = 1,
        spares: int = 0,
        min_workers: int = 1,
        backend: Backend | Literal["local", "ray"] = "local",
        resources_per_worker: Mapping[str, float] | None = None,
        fault_tolerance: FaultTolerance = "restart",
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | timedelta | None = None,
        keep_last: int = 3,
        resume: Literal["auto"] | None = None,
        batch_size: int | None = None,
        seed: int = 0,
        use_gpu: bool | None = None,
        num_threads: int | None = None,
        ddp_args: Mapping[str, Any] | None = None,
        run_name: str = "trainer",
        heartbeat_timeout_s: float = 5.0,
        start_timeout_s: float = 120.0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S,
        first_pause_s: float = 0.5,
        max_pause_s: float = 60.0,
        resources_timeout_s: float = 600.0,
        grow_every_s: float = 5.0,
        max_restarts_without_progress: int | None = None,
        show_progress: bool | None = None,
        **unknown: Any,
    ) -> None:
        give_verdicts()
        arguments = dict(locals())
        check_options(Trainer.__init__, unknown.items())
        for name in ("self", "unknown", "backend", "show_progress"):
            del arguments[name]
        for name in ("config", "resources_per_worker", "ddp_args"):
            arguments[name] = {} if arguments[name] is None else arguments[name]
        self._config = TrainerConfig(**arguments)
        environment = Environment()
        speak_on_stderr(environment.log_level or "warning", environment.log_format, Speaker())
        self._show_progress = show_progress
        self._store: CheckpointStore | None = None
        self._using = threading.Lock()  # one call at a time
        self._user = 0  # its thread
        if checkpoint_dir is not None:
            self._open_store()
        job = self._config.job()
        self._backend, bind = _opened(backend, self._config)
        parts = RunParts(
            backend=self._backend,
            rules=self._config.rules(),
            job=job,
            resources=self._config.resources_per_worker,
            lighthouse_bind=bind,
        )
        self._shown = _Shown()
        self._driver = TrainerDriver(parts, self._shown)
        self._must_resume, self._is_closed = resume == AUTO, False
        self._trained: tuple[TrainTask, Position] | None = None  # last, and until where

    # -- training --------------------------------------------------------------------------------

    def train(
        self,
        num_steps: int | None = None,
        *,
        max_retries: int = DEFAULT_MAX_RETRIES,
        checkpoint: str | os.PathLike[str] | None = None,
        reset_retries_after: int | None = None,
        reduce_results: bool = True,
        info: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> Any:
        """Train for one pass over the data, or call ``train_fn`` once.

        Args:
            num_steps: stop after so many steps; the next call goes on there. Not with ``train_fn``.
            max_retries: how many incidents are survived; -1: all. What is lost within one restart
                is one incident; to grow is none. The next incident ends the call.
            checkpoint: ``auto``: write checkpoints, at least one before the pass. A path: begin
                with the checkpoint there. None: none are written; if all workers are lost, training
                goes on from the state that the trainer has kept after the last call.
            reset_retries_after: after so many steps without an incident none counts any more.
            reduce_results: average the results of the workers; otherwise they are a list.
            info: for ``batch_loss`` and ``context.info``.

        Returns:
            A dict: the averages of the pass (or what ``train_fn`` returned, as ``result``, and its
            ``reports``), where training is (``epoch``, ``step``), ``num_workers``, ``retries``, and
            what ``incidents`` cost.

        Raises:
            TrainingFailed: workers were lost, and no retry is left. The last state is kept: the
                next call goes on with it.
            Exception: that of the user's program, if no retry is left, or if it came twice at the
                same step.
            ConfigError: an argument that cannot work.
        """
        check_options(Trainer.train, unknown.items())
        check_num_steps(num_steps)
        if num_steps is not None and self._config.train_fn is not None:
            raise ConfigError("num_steps", num_steps, "train_fn decides how long it trains")
        retries = budget(max_retries, reset_retries_after)
        checked = check_info(info)
        with self._alone():
            directory = self._prepare(checkpoint)
            first = self._driver.position
            if self._trained is not None and self._is_set_back():
                first = self._trained[1]
            task = TrainTask(
                num_steps=num_steps, checkpoint_dir=directory, info=checked, first=first
            )
            num_before = len(self._driver.history.incidents)
            self._shown.reports = []
            with self._shows("train", num_steps):
                self._driver.run_task(task, retries)
            self._trained = (task, self._driver.position)
            found = self._train_result(task, reduce_results)
            if isinstance(found, dict):
                incidents = list(self._driver.history.incidents)[num_before:]
                found.update(retries=self._driver.num_retries, incidents=incidents)
            if not directory:
                self._keep_state(retries)
            return found

    def validate(
        self,
        num_steps: int | None = None,
        *,
        max_retries: int = DEFAULT_MAX_RETRIES,
        reduce_results: bool = True,
        info: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> Any:
        """Evaluate the model on the validation data, a part of it in each worker.

        Args:
            num_steps: use so many batches of each worker only.

        Returns:
            The averages over all samples; a list of those of the parts if not ``reduce_results``.

        Raises: as `train`.
        """
        check_options(Trainer.validate, unknown.items())
        check_num_steps(num_steps)
        if self._config.train_fn is not None:
            reason = "it validates by itself: see TrainContext.share"
            raise ConfigError("train_fn", self._config.train_fn, reason)
        retries = budget(max_retries, None)
        checked = check_info(info)
        with self._alone():
            self._resume()
            num_parts = self._driver.num_workers or self._config.num_workers
            task = ValidateTask(num_steps=num_steps, num_parts=num_parts, info=checked)
            is_done = False
            while not is_done:
                self._driver.run_task(task, retries)
                is_done = task.is_done()
                if self._catch_up(retries):
                    task = ValidateTask(num_steps=num_steps, num_parts=num_parts, info=checked)
                    is_done = False
        results = [task.results[part] for part in sorted(task.results)]
        return reduced(results) if reduce_results else results

    # -- states ----------------------------------------------------------------------------------

    def get_model(self) -> Any:
        """The model as it is trained so far, on the CPU; a list, if there are several.

        Raises:
            ConfigError: ``train_fn`` makes the model, so only `state_dict` is known.
        """
        if self._config.model_creator is None:
            reason = "train_fn makes it: use state_dict()"
            raise ConfigError("model_creator", None, reason)
        with self._alone():
            made, pairs = self._models_for(self._state())
        for model, its_state in pairs:
            model.load_state_dict(its_state)
        return made

    def state_dict(self) -> dict[str, Any]:
        """The whole state of training: ``position``, and in ``parts`` model, optimizer, ..."""
        with self._alone():
            return to_tree(self._state())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            ConfigError: it does not fit the model; nothing has changed.
            CheckpointError: it is no such state.
        """
        state = from_tree(state_dict, "load_state_dict")
        with self._alone():
            self._check_fits(state)
            self._begin_with_copy(state)

    def save(self, path: str | os.PathLike[str] | None = None) -> str:
        """Write a checkpoint; returns where it is (default: in ``checkpoint_dir``).

        Raises:
            CheckpointError, ConfigError: it cannot be written there.
        """
        with self._alone():
            state = self._state()
            if path is None:
                return self._open_store().write(state).path
            return save_checkpoint(path, state).path

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from the checkpoint at ``path``, or from the newest good one in that folder.

        Raises:
            CheckpointError: there is none, or it is damaged.
            ConfigError: it does not fit the model; nothing has changed.
        """
        with self._alone():
            self._load(path)

    # -- the rest --------------------------------------------------------------------------------

    @property
    def history(self) -> RunHistory:
        """Steps over time, and the incidents with what they cost."""
        return self._driver.history

    @property
    def position(self) -> Position:
        """The position of training; with ``resume``, where it will begin."""
        self._resume()
        return self._driver.position

    @property
    def num_workers(self) -> int:
        """The number of workers that are ready now."""
        return self._driver.num_workers

    @property
    def num_spares(self) -> int:
        """The number of workers that stand by now."""
        return self._driver.num_spares

    @property
    def worker_pids(self) -> dict[int, int]:
        """Process ids of the workers that have started, by rank; any thread may ask."""
        return dict(self._driver.pids)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Draw the run: its steps over time, each incident with its cost, how many workers ran.

        Raises:
            ConfigError: matplotlib is missing, or does not know this kind of file.
        """
        draw_run(self.history, path)

    def shutdown(self, *, force: bool = False) -> None:
        """End all workers (``force``: at once) and free all resources; may be called twice.

        A call that another thread has made, or that a signal has interrupted, ends with
        `TrainingFailed`.
        """
        if self._is_closed:
            return
        self._is_closed = True
        is_alone = self._using.acquire(blocking=False)
        if not is_alone:
            self._driver.stop("the trainer was shut down")
            if self._user != threading.get_ident():  # else it cannot end before this returns
                is_alone = self._using.acquire(timeout=_STOP_S)
        try:
            if is_alone and not force:
                self._driver.dismiss()
        finally:
            if is_alone:
                self._using.release()
            self._backend.close()
            self._driver.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.shutdown(force=kind is not None)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Raises `ConfigError`: the trainer is shut down, or another call has not returned."""
        if self._is_closed:
            raise ConfigError("trainer", "shut down", "make another one")
        if not self._using.acquire(blocking=False):
            raise ConfigError("trainer", "in use", "another call of it has not returned yet")
        self._user = threading.get_ident()
        try:
            yield
        finally:
            self._using.release()

    def _open_store(self) -> CheckpointStore:
        if self._store is None:
            directory = self._config.checkpoint_dir
            directory = DEFAULT_CHECKPOINT_DIR if directory is None else directory
            store = CheckpointStore(directory, self._config.keep_last)
            if store.is_in_memory:
                reason = "workers are other processes, and do not share this one's memory"
                raise ConfigError("checkpoint_dir", directory, reason)
            store.check_writable()
            self._store = store
        return self._store

    def _prepare(self, checkpoint: str | os.PathLike[str] | None) -> str:
        """Prepare the directory of checkpoints, and return it; empty: none are written."""
        if checkpoint == AUTO:
            store = self._open_store()
            self._resume()
            self._driver.use_store(store)
            return store.directory
        self._resume()
        if checkpoint is not None:
            self._load(checkpoint)
        return ""

    def _resume(self) -> None:
        if not self._must_resume or self._is_closed:
            return
        found = self._open_store().newest_fitting(self._check_fits)
        if found is not None:
            self._begin_with(found, StateSource.CHECKPOINT)
        self._must_resume = False

    def _begin_with(self, found: Checkpoint, source: StateSource) -> None:
        known = known_state(source, found.position, checkpoint=found.path)
        is_continued = source is StateSource.CHECKPOINT
        self._trained = None
        self._driver.begin_with(known, found.position, is_continued=is_continued)

    def _load(self, path: str | os.PathLike[str]) -> None:
        found = find_checkpoint(path, self._check_fits)
        if CheckpointStore(path).is_in_memory:  # of this process alone
            self._begin_with_copy(load_checkpoint(found.path))
        else:
            self._begin_with(found, StateSource.GIVEN)
        self._must_resume = False

    def _begin_with_copy(self, state: TrainingState) -> None:
        """Begin with a state that is in this process; each worker gets a copy."""
        handle = self._backend.write_state(state.position, encode_state(state))
        known = known_state(StateSource.GIVEN, state.position, handle=handle)
        self._trained = None
        self._must_resume = False
        self._driver.begin_with(known, state.position)

    def _train_result(self, task: TrainTask, reduce_results: bool) -> Any:
        results = [task.results[worker] for worker in sorted(task.results)]
        if not reduce_results:
            return results
        position = self._driver.position
        if self._config.train_fn is None:
            found = reduced(results)
        else:
            found = {"result": results[0] if results else None, "reports": self._shown.reports}
        found.update(epoch=position.epoch, step=position.step)
        return {**found, "num_workers": self._driver.num_workers}

    def _is_set_back(self) -> bool:
        """Whether the run is before the end of the last `train`: all workers were lost since."""
        if self._trained is None:
            return False
        now, then = self._driver.position, self._trained[1]
        return (now.epoch, now.num_samples) < (then.epoch, then.num_samples)

    def _catch_up(self, retries: RetryBudget) -> bool:
        """Do again what was lost since the last `train`; whether there was anything."""
        if not self._is_set_back():
            return False
        assert self._trained is not None
        task, _ = self._trained
        self._shown.reports = []
        task.restarted()
        self._driver.run_task(task, retries)
        self._trained = (task, self._driver.position)
        return True

    def _keep_state(self, retries: RetryBudget) -> None:
        """Fetch a state, which is what is left if all workers are lost without a checkpoint."""
        task = GiveStateTask()
        self._driver.run_task(task, retries)
        if self._catch_up(retries):
            self._driver.run_task(task, retries)
        if task.handle is not None:
            self._driver.hold_state(task.handle.position, task.handle)

    def _state(self) -> TrainingState:
        self._resume()
        if not self._driver.num_workers or self._driver.held.step < self._driver.position.step:
            self._keep_state(RetryBudget(max_retries=DEFAULT_MAX_RETRIES))
        held = self._driver.held
        if held.handle is None and held.checkpoint:
            return load_checkpoint(held.checkpoint)
        if held.handle is not None:
            try:
                return self._read(held)
            except CheckpointError as error:  # somebody has deleted it
                log.warning("%s: a worker gives its state anew", error)
        self._keep_state(RetryBudget(max_retries=DEFAULT_MAX_RETRIES))
        held = self._driver.held
        if held.handle is None:
            raise ConfigError("state", None, "nothing is trained yet: call prepare first")
        return self._read(held)

    def _read(self, held: KnownState) -> TrainingState:
        handle: Any = held.handle
        return decode_state(self._backend.read_state(handle), "a worker")

    def _check_fits(self, state: TrainingState) -> None:
        """Check that the state is of the model, if that can be made here."""
        if self._config.model_creator is not None:
            self._models_for(state)

    def _models_for(self, state: TrainingState) -> tuple[Any, list[tuple[Any, Mapping[str, Any]]]]:
        """The models of ``model_creator``, each with its part of ``state``.

        Raises:
            ConfigError: it does not fit.
        """
        assert self._config.model_creator is not None
        made = self._config.model_creator(self._config.config)
        models = list(made) if isinstance(made, list | tuple) else [made]
        return made, pair_models(models, state)

    @contextlib.contextmanager
    def _shows(self, title: str, num_steps: int | None) -> Iterator[None]:
        first = self._driver.position.step
        last = None if num_steps is None else first + num_steps
        with progress_bar(title, first, last, self._show_progress) as bar:
            self._shown.bar = bar
            try:
                yield
            finally:
                self._shown.bar = None


class _Shown(RunObserver):
    """Shows on a progress bar what happens, and keeps reports."""

    def __init__(self) -> None:
        self.bar: ProgressBar | None = None
        self.reports: list[dict[str, Any]] = []
        self._metrics: Mapping[str, Any] = {}

    def moved(self, position: Position, num_workers: int) -> None:
        if self.bar is not None:
            self.bar.update(time.monotonic(), position, num_workers, self._metrics)

    def reported(self, position: Position, metrics: Mapping[str, Any]) -> None:
        self._metrics = metrics
        self.reports.append({"epoch": position.epoch, "step": position.step, **metrics})

    def warned(self, sentence: str) -> None:
        if self.bar is not None:
            self.bar.show_sentence(sentence)


def _opened(backend: Any, config: TrainerConfig) -> tuple[Backend, str]:
    """The engine, and where a lighthouse listens that its workers reach."""
    if backend == "local":
        check_resources(config.resources_per_worker, config.min_workers)
        return LocalBackend(), "127.0.0.1:0"
    is_ray = backend == "ray" or type(backend).__module__ == _RAY_MODULE
    if config.spares and is_ray:
        reason = "Ray's places are reserved for workers that train: use backend='local'"
        raise ConfigError("spares", config.spares, reason)
    if backend == "ray":
        found: Backend = importlib.import_module(_RAY_MODULE).RayBackend()
        return found, ":0"
    if isinstance(backend, str | type) or not hasattr(backend, "num_startable"):
        raise ConfigError("backend", backend, "use 'local', 'ray' or a Backend")
    is_local = isinstance(backend, LocalBackend)
    return backend, "127.0.0.1:0" if is_local else ":0"
