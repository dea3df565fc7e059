"""Carries a scenario out: builds its world, lets the faults happen, and looks how it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tools.sim.copies import HolderActor, HolderHost
from tools.sim.copy_checks import SETTLED_S, CopyChecks
from tools.sim.invariants import EVENTS_BETWEEN_WALKS, SLACK_S, Invariants, first_violation, must
from tools.sim.lighthouse_actor import QuorumAnswer
from tools.sim.lighthouses import Lighthouses
from tools.sim.network import MEAN_LATENCY_S, Network
from tools.sim.scenario import MEAN_COPY_S, Fault, Scenario
from tools.sim.shared import Shared
from tools.sim.site import Saved, Site
from tools.sim.sums import Sums
from tools.sim.terms import Companions, Histories, Terms
from tools.sim.trace import Trace
from tools.sim.trainer_actor import WorkerActor
from tools.sim.world import Process, VirtualWorld
from torchft_svc.core.quorum.manager.commit_barrier import AnswerVote
from torchft_svc.core.quorum.manager.group import AnswerWorker
from torchft_svc.core.quorum.session_messages import NewcomerWaits
from torchft_svc.core.quorum.term import TermEnds

# They leave a group's connections to its manager and lighthouse alone.
FAULTS_OF_PROGRAMS = frozenset(
    {
        "hang",
        "hang_between",
        "lose_update",
        "spoil_update",
        "break_sum",
        "drain",
        "put_off",
        "stall",
    }
)
# Those of them by which the others lose no step: the group knows in time what is to come.
FAULTS_WITHOUT_COST = frozenset({"drain", "lose_update", "spoil_update"})
# A group that they leave running may be taken for lost, and be back beside its substitute.
FAULTS_THAT_END_GROUPS = frozenset(
    {"crash", "crash_all", "crash_worker", "leave", "drain", "finish", "accept_loss"}
)
LAG_FACTOR = 2000.0
# One message in 20,000 is on its way for longer than so many times the mean.
LONG_WAY = 10.0
# Groups that end when their question times out, and are started again, do not ask all the time.
OPERATOR_REPEATS_S, MAX_REPEATS = 0.7, 40
# The step of another run's checkpoint.
FOREIGN_STEP = 7
# So many pass for each group before the core is walked through again: a walk costs more for many.
EVENTS_PER_GROUP = 20
# How often it is checked what holders hold.
EVENTS_BETWEEN_LOOKS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a run ended: well, unless ``fell`` names an invariant."""

    scenario: Scenario
    fell: str | None
    what: str
    trace: tuple[str, ...]
    num_events: int
    num_commits: int
    num_discards: int
    virtual_s: float


class Fleet:
    """One run."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self.world = VirtualWorld(scenario.seed)
        self.network = Network(self.world)
        policy = scenario.config.on_step_regression
        self.invariants = Invariants(self.world, scenario.is_clock_honest, policy)
        self.trace = Trace(self.world)
        self.lighthouses = Lighthouses(
            self.world, self.network, scenario, self.invariants, self.trace
        )
        sums = Sums(self.network, self.invariants)
        has_one = scenario.num_lighthouses == 1 or scenario.is_elected
        terms = Terms(are_ids_ordered=scenario.is_clock_honest and has_one)
        companions = Companions(
            scenario.config.join_timeout_s,
            lambda: max(each.began_at for each in self.lighthouses.hosts.values()),
            lambda: self.lighthouses.splits.split_until,
        )
        is_checked = terms.are_ids_ordered and not scenario.unary_every
        histories = Histories(companions, is_checked, self.invariants.went_back)
        copy_every, size = scenario.trainer.copy_every, scenario.group_world_size
        is_quick = scenario.trainer.mean_copy_s <= MEAN_COPY_S
        copies = CopyChecks(self.world, copy_every, size, is_quick)
        self.shared = Shared(
            self.network, sums, self.invariants, terms, companions, histories, copies, self.trace
        )
        self.checkpoints: dict[str, Saved] = {}
        self.sites = [
            Site(number, self.world, self.lighthouses, self.shared, scenario, self.checkpoints)
            for number in range(scenario.num_groups + scenario.num_spares)
        ]
        self.invariants.groups.num_places.update(
            site.job for site in self.sites if not site.is_spare
        )
        for site in self.sites:
            site.others = [each for each in self.sites if each is not site]
        self.holders = [
            self._new_holder(f"holder{number}", f"job{number % scenario.num_jobs}", number)
            for number in range(scenario.num_holders * scenario.num_jobs)
        ]
        self.world.after_event = self._check
        ends = any(fault.kind == "finish" for fault in scenario.faults)
        self._has_fixed_groups = not (scenario.num_spares or ends)
        self._site_faults: dict[str, Callable[[Site, Fault], None]] = {
            "crash": lambda site, fault: site.crash(fault.seconds),
            "crash_worker": lambda site, fault: site.crash_worker(fault.value, fault.seconds),
            "crash_manager": lambda site, fault: site.crash_manager(),
            "lose_decision": lambda site, fault: self._die_sending(site, fault, AnswerVote),
            "lose_quorum": lambda site, fault: self._die_sending(site, fault, AnswerWorker),
            "foreign_checkpoint": self._foreign_checkpoint,
            "restart_workers": lambda site, fault: site.restart_workers(),
            "leave": lambda site, fault: site.leave(fault.seconds),
            "finish": self._finish,
            "drain": lambda site, fault: site.drain(by_signal=fault.value < 0.5),
            "freeze": self._freeze,
            "cut": lambda site, fault: self._cut_off(
                [process.name for process in site.processes()], fault.seconds
            ),
            "cut_manager": self._cut_manager,
            "reset": self._reset,
            "half_open": self._half_open,
            "lose_news": self._lose_news,
            "lag": self._lag,
        }

    def _new_holder(self, name: str, job: str, number: int) -> HolderHost:
        """A holder beside one of the groups, of the copies of all workers or of one."""
        size, rank = self._scenario.group_world_size, number // self._scenario.num_jobs
        ranks = [rank % size] if self._scenario.holds_parts else range(size)

        def start(process: Process) -> HolderActor:
            beside = f"g{number % self._scenario.num_groups}"
            return HolderActor(process, job, beside, ranks, size, self.lighthouses, self.shared)

        return HolderHost(name, self.world, start)

    def run(self) -> RunOutcome:
        """Run to the end: all jobs train together again, or an invariant is violated."""
        fell, what = first_violation(self._run)
        return RunOutcome(
            scenario=self._scenario,
            fell=fell,
            what=what,
            trace=tuple(self.trace.lines()),
            num_events=self.world.num_events,
            num_commits=self.shared.num_commits,
            num_discards=self.invariants.discards.num,
            virtual_s=self.world.now,
        )

    def _run(self) -> None:
        chance = self.world.chance("begin")
        for site in self.sites:
            site.start_after(chance.uniform(0.0, self._scenario.start_spread_s))
        nature = self.world.process("nature")
        for fault in self._scenario.faults:
            nature.after(fault.at, self._happen, fault)
        self.world.run(self._scenario.quiet_at, lambda: False)
        self.shared.is_calm = True
        self.shared.together.clear()
        if not self._comes_together():
            self._explain()
        self._check_copies_are_freed()
        self._check_memory(self.sites)
        for site in self.sites:
            site.check_streams()

    def _check_copies_are_freed(self) -> None:
        """Holders learn soon that a job has finished."""
        finished = {
            site.job
            for site in self.sites
            if site.is_over and any(each.checks.has_finished(site.job) for each in self.lighthouses)
        }
        if self.holders and finished:
            self.world.run(self.world.now + SETTLED_S, lambda: False)
            for job in sorted(finished):
                self.shared.copies.check_freed(job)

    def _comes_together(self) -> bool:
        """Whether all train together in the end, with an operator who accepts what is lost."""
        # Each group at the step that was gone back to may turn out to have no whole state of it.
        for number in range(2 + len(self.sites)):
            if number and not self._accept_losses_at_last():
                return False
            if self.world.run(self.world.now + self._scenario.patience_s, self._is_together):
                return True
        return False

    # -- faults ----------------------------------------------------------------------------------

    def _happen(self, fault: Fault) -> None:
        self.trace.record("FAULT", str(fault).split("s  ", 1)[1])
        self.shared.copies.record_fault(loses_all=fault.kind == "crash_all")
        if fault.is_for_holder:
            self._trouble_holder(self.holders[fault.target % len(self.holders)], fault)
        else:
            self._trouble_groups(fault)

    def _trouble_groups(self, fault: Fault) -> None:
        concerned = self._concerned(fault)
        self._record_trouble(fault, concerned)
        if self.lighthouses.apply_fault(fault):
            return
        if fault.kind == "accept_loss":
            self._accept_losses()
        elif fault.kind == "crash_all":
            for site in self.sites:
                site.crash(fault.seconds)
        elif fault.kind in self._site_faults:
            self._site_faults[fault.kind](concerned[0], fault)
        else:
            for worker in concerned[0].workers[int(fault.value * 2) :]:
                self._trouble(worker, fault)

    def _concerned(self, fault: Fault) -> list[Site]:
        """The group that a fault happens to; all groups of its job if that ends."""
        target = self.sites[fault.target % len(self.sites)]
        if fault.kind == "finish":
            return [each for each in self.sites if each.job == target.job]
        return [target]

    def _record_trouble(self, fault: Fault, concerned: list[Site]) -> None:
        """Excuse groups that something happens to, and those that it may cost a step."""
        for site in self.sites if fault.is_for_all else concerned:
            self.invariants.hangs.trouble(site.name, fault.seconds)
            if fault.kind not in FAULTS_THAT_END_GROUPS:
                self.invariants.groups.may_add(site.job)
        for site in concerned:
            self._trouble_companions(fault, site)
            if not fault.is_for_all:
                self.lighthouses.splits.record_trouble(site.name, fault.seconds)

    def _trouble_holder(self, host: HolderHost, fault: Fault) -> None:
        self.shared.copies.trouble(host.name, fault.seconds)
        holder, nature = host.holder, self.world.process("nature")
        if fault.kind == "holder_crash":
            host.crash(fault.seconds)
        elif holder is not None and fault.kind == "holder_freeze":
            holder.process.freeze()
            nature.after(fault.seconds, holder.process.thaw)
        elif holder is not None:
            self.network.cut(holder.process.name)
            nature.after(fault.seconds, self.network.mend, holder.process.name)

    def _trouble_companions(self, fault: Fault, site: Site) -> None:
        until, companions = self.world.now + fault.seconds, self.shared.companions
        if fault.is_for_all:
            companions.trouble_lighthouse(until)
            is_stopped = fault.kind == "lighthouse_freeze"
            self.shared.copies.trouble_lighthouse(fault.seconds, is_stopped=is_stopped)
        elif fault.kind == "crash_manager" and site.resumed() is not None:
            companions.trouble_line(site.name, until)
        else:
            is_reachable = fault.kind in FAULTS_OF_PROGRAMS
            is_costly = fault.kind not in FAULTS_WITHOUT_COST
            companions.trouble(site.name, until, is_reachable=is_reachable, is_costly=is_costly)

    def _trouble(self, worker: WorkerActor, fault: Fault) -> None:
        until = self.world.now + fault.seconds
        match fault.kind:
            case "stall":
                worker.vote_stalls_s = fault.seconds
            case "hang":
                worker.hung_until = until
            case "break_sum":
                worker.is_broken = True
            case "put_off":
                worker.puts_heals_off_until = until
            case "lose_update" | "spoil_update":
                worker.loses_update = "it raises" if fault.kind == "spoil_update" else ""
            case "hang_between":
                worker.hangs_between_s = fault.seconds
            case "die_with_sum":
                worker.dies_with_sum = True
            case "lose_answer":
                worker.line.loses_next_answer = True
            case "reset_worker":
                worker.line.break_off()

    def _accept_losses(self) -> bool:
        """Whether a job was held back for that."""
        jobs = sorted({site.job for site in self.sites})
        accepted = [each.accept_loss(job) for job in jobs for each in self.lighthouses]
        return any(accepted)

    def _accept_losses_at_last(self) -> bool:
        """An operator repeats the command until it is accepted, for a while; whether it was, or all
        train together."""
        for _ in range(MAX_REPEATS):
            until = self.world.now + OPERATOR_REPEATS_S
            if self._accept_losses() or self.world.run(until, self._is_together):
                return True
        return False

    def _die_sending(self, site: Site, fault: Fault, what: type) -> None:
        """Kill the manager as soon as it has sent ``what`` to one of its workers.

        If that happens to two groups in one quorum, those that got it may be of different ranks,
        and each waits for its peer in the other group until the timeout of the collective.
        """

        def crash_after(answer: object) -> None:
            if isinstance(answer, what) and not self.shared.is_calm:
                if what is AnswerWorker:
                    until = self.world.now + self._scenario.trainer.collective_s
                    self.shared.companions.trouble(site.name, until, is_reachable=True)
                site.crash_manager(fault.seconds)

        if site.manager is not None:
            site.manager.on_answer = crash_after

    def _foreign_checkpoint(self, site: Site, fault: Fault) -> None:
        site.begins_at = FOREIGN_STEP
        site.crash(fault.seconds)

    def _finish(self, site: Site, fault: Fault) -> None:
        """The programs of a whole job end on purpose, one soon after the other."""
        for each in self.sites:
            if each.job == site.job:
                each.finish()

    def _freeze(self, site: Site, fault: Fault) -> None:
        """SIGSTOP, and SIGCONT later: what was sent meanwhile is read then."""
        for process in site.processes():
            process.freeze()
            self.world.process("nature").after(fault.seconds, process.thaw)

    def _cut_manager(self, site: Site, fault: Fault) -> None:
        if site.manager is not None:
            self._cut_off([site.manager.process.name], fault.seconds)

    def _cut_off(self, names: list[str], seconds: float) -> None:
        for name in names:
            self.lighthouses.splits.record_unreachable(name.partition("/")[0], seconds)
            self.network.cut(name)
            self.world.process("nature").after(seconds, self.network.mend, name)

    def _reset(self, site: Site, fault: Fault) -> None:
        self.lighthouses.splits.record_unreachable(site.name, 0.0)
        if site.manager is not None:
            self.network.break_streams(site.manager.process.name)

    def _half_open(self, site: Site, fault: Fault) -> None:
        if site.manager is not None:
            self.network.half_open(site.manager.process.name)

    def _lose_news(self, site: Site, fault: Fault) -> None:
        """The connection breaks while news, or an answer, are on their way, and the lighthouse does
        not notice."""
        kinds = (NewcomerWaits, TermEnds) if fault.value < 0.5 else (QuorumAnswer,)
        manager = site.manager
        if manager is None:
            return

        def loses(news: object) -> bool:
            if self.shared.is_calm or not isinstance(news, kinds):
                return False
            manager.link.loses = None
            self.shared.companions.trouble(site.name, self.world.now)
            self._half_open(site, fault)
            return True

        manager.link.loses = loses

    def _lag(self, site: Site, fault: Fault) -> None:
        last_s = LONG_WAY * LAG_FACTOR * fault.value * MEAN_LATENCY_S  # what was sent at its end
        self.invariants.hangs.trouble(site.name, fault.seconds + last_s)
        self.shared.companions.trouble(site.name, self.world.now + fault.seconds + last_s)
        self.lighthouses.splits.record_unreachable(site.name, fault.seconds + last_s)
        for process in site.processes():
            self.network.set_lag(process.name, LAG_FACTOR * fault.value)
            nature = self.world.process("nature")
            nature.after(fault.seconds, self.network.set_lag, process.name, 1.0)

    # -- how it goes -----------------------------------------------------------------------------

    def _check(self) -> None:
        self.invariants.waits.check()
        if self.holders and self.world.num_events % EVENTS_BETWEEN_LOOKS == 0:
            self.shared.copies.check()
        every = max(EVENTS_BETWEEN_WALKS, EVENTS_PER_GROUP * len(self.sites))
        if self.world.num_events % every == 0:
            number = self.world.num_events // every
            self._check_memory([self.sites[number % len(self.sites)]])

    def _check_memory(self, sites: list[Site]) -> None:
        for lighthouse in self.lighthouses:
            self.invariants.bounds.check(lighthouse.core, len(self.sites))
            process = lighthouse.process
            has_read_all = process.thawed_at == 0.0 or process.thawed_at + SLACK_S < self.world.now
            if has_read_all and not (process.is_dead or process.is_frozen):
                lighthouse.checks.check_memory()
        for site in sites:
            if site.manager is not None:
                self.invariants.bounds.check(site.manager.group, site.group_world_size)
                self.invariants.bounds.check(site.manager.link.machine, len(self.sites))

    def _is_together(self) -> bool:
        """All workers of each job have committed one step of one quorum, except for prepared spares
        that stand by; and those of a job that has finished have ended."""
        return all(map(self._is_job_together, self.invariants.groups.num_places))

    def _is_job_together(self, job: str) -> bool:
        _, count = self.shared.together.get(job, ((0, 0), 0))
        if self._has_fixed_groups:
            num_groups = self.invariants.groups.num_places[job]
            return count == num_groups * self._scenario.group_world_size
        sites = [site for site in self.sites if site.job == job]
        if sites[0].is_over:
            return not any(site.processes() for site in sites if site.trains or self._ends(site))
        return count == sum(site.trains for site in sites) * self._scenario.group_world_size

    def _ends(self, site: Site) -> bool:
        """Whether a prepared spare has to end: the lighthouse to which it has come knows that the
        job has finished there (rule G4)."""
        return any(each.checks.has_to_end(site.job, site.name) for each in self.lighthouses)

    def _explain(self) -> None:
        """Groups that were held back have been let through by now, so none may wait."""
        for job in self.invariants.groups.num_places:
            why = "; ".join(each.core.jobs.why(job, self.world.now) for each in self.lighthouses)
            _, count = self.shared.together.get(job, ((0, 0), 0))
            quiet_s = self.world.now - self._scenario.quiet_at
            must(
                self._is_job_together(job),
                "I5",
                f"{job} is not together {quiet_s:.0f} s after the last fault, {count} of its "
                f"workers are; the lighthouse: {why}",
            )
