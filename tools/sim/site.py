"""One replica group's hosts in a simulated world: what is started there, and started again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tools.sim.copy_checks import KNOWN_S
from tools.sim.invariants import SLACK_S, must
from tools.sim.lighthouses import Lighthouses
from tools.sim.link_actor import LinkSite
from tools.sim.manager_actor import ManagerActor
from tools.sim.offers import Fetched
from tools.sim.scenario import Scenario
from tools.sim.shared import Shared
from tools.sim.sums import GroupCollective, State
from tools.sim.trainer_actor import WorkerActor
from tools.sim.world import Process, VirtualWorld
from torchft_svc.core.quorum.manager.lighthouse_link import ManagerLinkConfig
from torchft_svc.core.quorum.session_messages import Hello, Leave
from torchft_svc.core.quorum.types import Resumed

Saved = dict[int, Fetched]  # by group rank

# Rarer than in production, where it would only make more of the same events.
HEARTBEAT_INTERVAL_S = 0.3
# How long a launcher takes to notice a dead worker, and to end the others.
NOTICE_S = 0.3
# How long a trainer that failed by itself takes to be back.
RESTART_S = 1.0
# A step is counted when its update is in place, which is reported a moment later; and the last one
# may be this group's alone (E5).
MAX_STEPS_UNREPORTED = 3
# How long a launcher leaves the workers that do not know that their group is drained.
DRAIN_GRACE_S = 10.0
# Rank 0's worker takes to start another manager when the first is gone.
NEW_MANAGER_S = 0.2
SPARE_MANAGER_S = 0.02  # a process that waits for that


class Site:
    """A group's launcher: a manager and its workers, as one incarnation after another."""

    def __init__(
        self,
        number: int,
        world: VirtualWorld,
        lighthouses: Lighthouses,
        shared: Shared,
        scenario: Scenario,
        checkpoints: dict[str, Saved],
    ) -> None:
        self.name = f"g{number}"
        self._is_always_ordinary = number < scenario.num_always_ordinary
        # Whether this life begins as a prepared spare.
        self.is_spare = self._began_as_spare = number >= scenario.num_groups
        self.is_over = False  # its job has ended on purpose: it is not started again
        self.job = f"job{number % scenario.num_jobs}"
        self.group_world_size = scenario.group_world_size
        self.manager: ManagerActor | None = None
        self.workers: list[WorkerActor] = []
        self.collective: GroupCollective | None = None
        self.begins_at = 0  # the next life: the step of a checkpoint that is not the job's
        self._world = world
        self._lighthouses = lighthouses
        self._shared = shared
        self._scenario = scenario
        self._checkpoints = checkpoints
        self._saving: Saved = {}
        self.others: Sequence[Site] = ()  # of all jobs
        self._num_lives = 0
        self._is_first_try = False  # of a newcomer, which has not failed to reach a lighthouse
        self._launcher = world.process(f"{self.name}/launcher")
        self._is_starting = False
        # In every other group the manager is not a child of the first worker, and survives it.
        self._is_sidecar = number % 2 == 1

    # -- life ------------------------------------------------------------------------------------

    def start_after(self, delay_s: float) -> None:
        """Start the group, unless that is under way."""
        if not (self._is_starting or self.is_over):
            self._is_starting = True
            self._launcher.after(delay_s, self._start)

    def _start(self) -> None:
        self._is_starting = False
        if self.is_over:
            return
        if self._num_lives and not (self._is_always_ordinary or self._began_as_spare):
            rate = self._scenario.spare_restart_rate
            self.is_spare = self._launcher.chance.random() < rate
        if self._num_lives and not self.is_spare:
            self._shared.invariants.groups.may_add(self.job)
        self._start_manager()
        self._start_workers()

    def _start_manager(self, resumed: Resumed | None = None) -> None:
        self._num_lives += 1
        in_quorum = [each.round.quorum for each in self.workers if not each.process.is_dead]
        is_newcomer = None in in_quorum or len(in_quorum) < self.group_world_size
        self._is_first_try = is_newcomer
        process = self._world.process(f"{self.name}/m{self._num_lives}")
        every = self._scenario.unary_every
        site = LinkSite(
            job=self.job,
            name=self.name,
            has_sessions=self.is_spare or not (every and int(self.name[1:]) % every == 0),
            on_hello=self._check_hello,
            network=self._shared.network,
            lighthouses=self._lighthouses,
        )
        config = ManagerLinkConfig(
            lighthouses=tuple(self._lighthouses.hosts),
            store_address=process.name,
            group_world_size=self.group_world_size,
            heartbeat_interval_s=HEARTBEAT_INTERVAL_S,
            connect_timeout_s=self._scenario.connect_timeout_s,
            quorum_retries=self._scenario.quorum_retries,
            min_replicas=self._scenario.requested_min_replicas,
            is_spare=self.is_spare,
            resumed=resumed,
        )
        shared = self._shared
        self.manager = ManagerActor(
            process, site, config, self._manager_ended, shared.invariants, shared.trace
        )
        self._shared.managers[process.name] = self.manager

    def _start_workers(self) -> None:
        self._num_lives += 1
        saved = self._checkpoints.get(self.job)
        self._saving = {}
        self.workers = []
        if self._scenario.is_lockstep:
            self.collective = GroupCollective(
                self._shared.network, self._shared.invariants, self.name, self.group_world_size
            )
        for group_rank in range(self.group_world_size):
            process = self._world.process(f"{self.name}/w{group_rank}.{self._num_lives}")
            worker = WorkerActor(process, self, group_rank, self._scenario.trainer, self._shared)
            self._shared.offers[process.name] = worker.offers
            if self.begins_at:
                worker.restore(Fetched(State(self.begins_at, worker.weights), 0, 0))
            elif saved is not None:
                worker.restore(saved[group_rank])
            self.workers.append(worker)
            process.on_death.append(self._on_worker_death(worker))
            worker.line.attach()
            process.after(0.0, worker.begin_step)
        self.begins_at = 0

    def _on_worker_death(self, worker: WorkerActor) -> Callable[[], None]:
        """The worker's stream to its manager ends; with rank 0, the manager ends, too."""
        collective = self.collective

        def died() -> None:
            if collective is not None:
                collective.break_up()
            self._shared.offers.pop(worker.process.name, None)
            is_costly = not worker.is_drained
            self._shared.companions.trouble(self.name, self._world.now, is_costly=is_costly)
            self._shared.histories.ended(self.job, self.name)
            manager = self.manager
            if manager is None or manager.process.is_dead:
                return
            latency_s = self._shared.network.latency(manager.process)
            manager.process.after(
                latency_s, manager.detach_worker, worker.group_rank, worker.process.name, "it died"
            )
            if worker.group_rank == 0 and not self._is_sidecar:
                manager.process.after(latency_s, manager.process.kill)

        return died

    # -- copies ----------------------------------------------------------------------------------

    def others_with_state(self) -> list[str]:
        """The other groups of the job that train, and were well for a while; unknown in a list
        without election, where a group that starts may ask a lighthouse at which the job is not."""
        if self._scenario.num_lighthouses > 1 and not self._scenario.is_elected:
            return []
        return [each.name for each in self.others if each.job == self.job and each.has_state]

    @property
    def has_state(self) -> bool:
        """Whether all workers were in a quorum with a state, and well for a while."""
        since = self._world.now - KNOWN_S
        is_well = self._shared.companions.settled_since([self.name]) < since
        alive = [each for each in self.workers if not each.process.is_dead]
        is_whole = len(alive) == self.group_world_size
        return is_well and is_whole and all(each.has_state for each in alive)

    def check_origins(self) -> None:
        """Copies of different states are not mixed (rule B4)."""
        alive = [each for each in self.workers if not each.process.is_dead]
        origins = {each.origin for each in alive if each.origin is not None}
        must(len(origins) <= 1, "B4", f"{self.name} has begun from copies of {sorted(origins)}")

    # -- faults ----------------------------------------------------------------------------------

    def crash(self, down_s: float) -> None:
        for worker in self.workers:
            worker.process.kill()
        self._kill_manager()
        self.start_after(down_s)

    def crash_worker(self, which: float, down_s: float) -> None:
        """The launcher ends the other workers when it notices."""
        if self.workers:
            self.workers[int(which * len(self.workers))].process.kill()
            self._launcher.after(NOTICE_S, self._end_the_others, down_s)

    def worker_failed(self, why: str) -> None:
        """The launcher starts the group again."""
        self._shared.trace.record(self.name, f"a worker ends: {why}")
        self._launcher.after(NOTICE_S, self._end_the_others, RESTART_S)

    def _manager_ended(self) -> None:
        """End the group, as its manager was asked to."""
        self._kill_manager()
        self.worker_failed("its manager was asked to end it")

    def is_manager_over(self) -> bool:
        """Whether the manager has ended with the first worker, which would have started another."""
        return not self._is_sidecar and self.workers[0].process.is_dead

    def worker_drained(self, *, has_left: bool) -> None:
        """Start the group again later, once all workers have ended in good order.

        ``has_left``: the group has left its lighthouse. Otherwise the worker has ended without its
        manager, and the next one does not drain the others (rule M11): the launcher ends them.
        """
        if all(worker.process.is_dead for worker in self.workers):
            self._launcher.after(NOTICE_S, self._end_the_others, RESTART_S)
        elif not has_left:
            self._launcher.after(DRAIN_GRACE_S, self._end_undrained, self.workers)

    def _end_undrained(self, workers: list[WorkerActor]) -> None:
        if self.workers is workers:
            self._end_the_others(RESTART_S)

    def _end_the_others(self, down_s: float) -> None:
        """A manager that is not a child of the first worker survives."""
        if self._is_starting:
            return
        if not self._outlives_workers() or self.is_over:
            self.crash(down_s)
            return
        for worker in self.workers:
            worker.process.kill()
        self._is_starting = True
        self._launcher.after(down_s, self._start_beside_manager)

    def _start_beside_manager(self) -> None:
        if self.manager is None or self.manager.process.is_dead:
            self._start()
            return
        self._is_starting = False
        self._start_workers_again()

    def _outlives_workers(self) -> bool:
        return self._is_sidecar and self.manager is not None and not self.manager.process.is_dead

    def crash_manager(self, down_s: float | None = None) -> None:
        """Rank 0 starts another one."""
        in_term = self.resumed() is not None
        if down_s is None:
            down_s = SPARE_MANAGER_S if in_term and self.group_world_size > 1 else NEW_MANAGER_S
        self._kill_manager()
        rounds = {worker.line.last_round for worker in self.workers}
        if self.collective is not None:
            self.collective.lose_manager(down_s)
            if 0 in rounds or len(rounds) > 1:
                # Their last questions were not answered, or these were the first ones.
                self.collective.excuse()
                self._shared.invariants.hangs.trouble(self.name, self._scenario.trainer.quorum_s)
        for worker in self.workers:
            worker.line.end()
        self._launcher.after(down_s, self._replace_manager)

    def _replace_manager(self) -> None:
        if self._is_starting or (self.manager is not None and not self.manager.process.is_dead):
            return
        if self.is_over and not self.processes():  # nobody would end it
            return
        self._start_manager(self.resumed())

    def resumed(self) -> Resumed | None:
        """The incarnation that another manager would continue."""
        if self._is_sidecar or not self.workers or self.workers[0].process.is_dead:
            return None
        return self.workers[0].round.membership_to_resume()

    def restart_workers(self) -> None:
        """Beside a manager that survives, if it is not a child of the first worker."""
        if self._is_starting or not self.workers:
            return
        if not self._outlives_workers():
            self.crash(RESTART_S)
            return
        for worker in self.workers:
            worker.process.kill()
        self._start_workers_again()

    def _start_workers_again(self) -> None:
        """Beside a manager that may have taken a place: then it keeps none for the spare."""
        if not self.is_over:
            self._shared.invariants.groups.may_add(self.job)
            self._start_workers()

    def finish(self) -> None:
        """The program ends on purpose; one that stands by has to be ended by its lighthouse."""
        self.is_over = True
        self._end_if_it_trains()

    def _end_if_it_trains(self) -> None:
        """One that takes a place at that moment trains to the end of its program, too."""
        if self.trains:
            self.leave(0.0)
        elif self.processes():
            self._launcher.after(1.0, self._end_if_it_trains)

    @property
    def trains(self) -> bool:
        """Whether the group is no prepared spare, or has been one."""
        return not self.is_spare or any(not each.round.stands_by for each in self.workers)

    def leave(self, down_s: float) -> None:
        """Shut the group down in the middle of a step; it is back later."""
        if self.manager is not None and not self.manager.process.is_dead:
            self.manager.link.leave(Leave("it wants to", ends=True))
        self._launcher.after(NOTICE_S, self.crash, down_s)

    def drain(self, by_signal: bool) -> None:
        """SIGTERM to one of its workers, or an operator command at the lighthouse."""
        if not by_signal:
            for each in self._lighthouses:
                each.drain(self.job, self.name)
            return
        alive = [worker for worker in self.workers if not worker.process.is_dead]
        if alive:
            alive[-1].drain("it got SIGTERM")

    def _check_hello(self, hello: Hello) -> None:
        """A session begins with the step that all workers have reached in their quorum (rule E5);
        the last one may not have been reported yet, and one that heals in it has another step."""
        last, now = hello.last, self._world.now
        if self._is_first_try:
            self._is_first_try = False
            self._shared.companions.tries_first(now)
        rounds = [worker.round for worker in self.workers]
        is_well = self._shared.companions.is_well_since(self.name, now - SLACK_S)
        if not (is_well and rounds) or any(not each.quorum or each.quorum.heal for each in rounds):
            return
        is_present = all(each.quorum.quorum_id == last.quorum_id for each in rounds if each.quorum)
        step = min(each.step.state.step for each in rounds)
        is_true = last.max_step >= step - MAX_STEPS_UNREPORTED
        what = f"{self.name} begins a session with step {last.max_step}, and is at {step}"
        must(is_true or not is_present, "I4", what)

    def check_streams(self) -> None:
        """Each worker has a stream to its manager, or has lost it just now."""
        for worker in self.workers:
            process = worker.process
            is_new = worker.line.changes_at + SLACK_S > self._world.now
            is_attached = self.manager is not None and self.manager.is_attached(process.name)
            what = f"{process.name} has no stream to its manager"
            must(is_attached or is_new or process.is_dead, "I5", what)

    def processes(self) -> list[Process]:
        found = [worker.process for worker in self.workers]
        if self.manager is not None:
            found.append(self.manager.process)
        return [process for process in found if not process.is_dead]

    def _kill_manager(self) -> None:
        if self.manager is not None:
            self.manager.process.kill()
            if self.resumed() is None:
                self._shared.companions.trouble(self.name, self._world.now)
            self._shared.managers.pop(self.manager.process.name, None)

    # -- checkpoints -----------------------------------------------------------------------------

    def save(self, group_rank: int, saved: Fetched) -> None:
        """A periodic checkpoint of the job, which counts when all workers of a group have
        written."""
        every = self._scenario.save_every
        if not every or saved.state.step % every:
            return
        if any(other.state.step != saved.state.step for other in self._saving.values()):
            self._saving = {}
        self._saving[group_rank] = saved
        if len(self._saving) == self.group_world_size:
            self._checkpoints[self.job], self._saving = self._saving, {}
