from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNKNOWN: _ClassVar[Phase]
    PHASE_IDLE: _ClassVar[Phase]
    PHASE_WAITING: _ClassVar[Phase]
    PHASE_HEALING: _ClassVar[Phase]
    PHASE_TRAINING: _ClassVar[Phase]
    PHASE_VOTING: _ClassVar[Phase]

class Departure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEPARTURE_OTHER: _ClassVar[Departure]
    DEPARTURE_DRAINED: _ClassVar[Departure]
    DEPARTURE_KILLED: _ClassVar[Departure]

class AgentStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AGENT_UNKNOWN: _ClassVar[AgentStatus]
    AGENT_JOINING: _ClassVar[AgentStatus]
    AGENT_WARMING: _ClassVar[AgentStatus]
    AGENT_READY: _ClassVar[AgentStatus]
    AGENT_WORKING: _ClassVar[AgentStatus]
    AGENT_FINISHED: _ClassVar[AgentStatus]

class Wish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WISH_SOME: _ClassVar[Wish]
    WISH_NONE: _ClassVar[Wish]
    WISH_ALONE: _ClassVar[Wish]

class Fate(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FATE_ABORTED: _ClassVar[Fate]
    FATE_CONTINUES: _ClassVar[Fate]
    FATE_ENDS: _ClassVar[Fate]
PHASE_UNKNOWN: Phase
PHASE_IDLE: Phase
PHASE_WAITING: Phase
PHASE_HEALING: Phase
PHASE_TRAINING: Phase
PHASE_VOTING: Phase
DEPARTURE_OTHER: Departure
DEPARTURE_DRAINED: Departure
DEPARTURE_KILLED: Departure
AGENT_UNKNOWN: AgentStatus
AGENT_JOINING: AgentStatus
AGENT_WARMING: AgentStatus
AGENT_READY: AgentStatus
AGENT_WORKING: AgentStatus
AGENT_FINISHED: AgentStatus
WISH_SOME: Wish
WISH_NONE: Wish
WISH_ALONE: Wish
FATE_ABORTED: Fate
FATE_CONTINUES: Fate
FATE_ENDS: Fate

class QuorumMember(_message.Message):
    __slots__ = ("replica_id", "address", "store_address", "step", "world_size", "shrink_only", "data", "commit_failures", "seen_quorum_id", "joining", "min_replicas", "last_num_groups", "has_history", "layout", "doubted_step", "step_quorum_id", "steady", "sole_lighthouse")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHRINK_ONLY_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    SEEN_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    JOINING_FIELD_NUMBER: _ClassVar[int]
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    LAST_NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    HAS_HISTORY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DOUBTED_STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    STEADY_FIELD_NUMBER: _ClassVar[int]
    SOLE_LIGHTHOUSE_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    address: str
    store_address: str
    step: int
    world_size: int
    shrink_only: bool
    data: str
    commit_failures: int
    seen_quorum_id: int
    joining: bool
    min_replicas: int
    last_num_groups: int
    has_history: bool
    layout: str
    doubted_step: int
    step_quorum_id: int
    steady: bool
    sole_lighthouse: bool
    def __init__(self, replica_id: _Optional[str] = ..., address: _Optional[str] = ..., store_address: _Optional[str] = ..., step: _Optional[int] = ..., world_size: _Optional[int] = ..., shrink_only: bool = ..., data: _Optional[str] = ..., commit_failures: _Optional[int] = ..., seen_quorum_id: _Optional[int] = ..., joining: bool = ..., min_replicas: _Optional[int] = ..., last_num_groups: _Optional[int] = ..., has_history: bool = ..., layout: _Optional[str] = ..., doubted_step: _Optional[int] = ..., step_quorum_id: _Optional[int] = ..., steady: bool = ..., sole_lighthouse: bool = ...) -> None: ...

class Quorum(_message.Message):
    __slots__ = ("quorum_id", "participants", "created")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    PARTICIPANTS_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    participants: _containers.RepeatedCompositeFieldContainer[QuorumMember]
    created: _timestamp_pb2.Timestamp
    def __init__(self, quorum_id: _Optional[int] = ..., participants: _Optional[_Iterable[_Union[QuorumMember, _Mapping]]] = ..., created: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class LighthouseQuorumRequest(_message.Message):
    __slots__ = ("requester",)
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    requester: QuorumMember
    def __init__(self, requester: _Optional[_Union[QuorumMember, _Mapping]] = ...) -> None: ...

class LighthouseQuorumResponse(_message.Message):
    __slots__ = ("quorum",)
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    quorum: Quorum
    def __init__(self, quorum: _Optional[_Union[Quorum, _Mapping]] = ...) -> None: ...

class LighthouseHeartbeatRequest(_message.Message):
    __slots__ = ("replica_id",)
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    def __init__(self, replica_id: _Optional[str] = ...) -> None: ...

class LighthouseHeartbeatResponse(_message.Message):
    __slots__ = ("min_interval_ms",)
    MIN_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    min_interval_ms: int
    def __init__(self, min_interval_ms: _Optional[int] = ...) -> None: ...

class LighthouseLeaveRequest(_message.Message):
    __slots__ = ("replica_id", "reason", "between_steps", "ends")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BETWEEN_STEPS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    reason: str
    between_steps: bool
    ends: bool
    def __init__(self, replica_id: _Optional[str] = ..., reason: _Optional[str] = ..., between_steps: bool = ..., ends: bool = ...) -> None: ...

class LighthouseLeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LighthouseRoomRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LighthouseRoomResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LighthouseAboutRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LighthouseAboutResponse(_message.Message):
    __slots__ = ("version", "unix_s", "min_replicas", "join_timeout_ms", "heal_timeout_ms", "startup_timeout_ms", "startup_wait_ms", "heartbeat_timeout_ms", "hang_timeout_ms", "on_hang", "is_elected")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    JOIN_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    HEAL_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    STARTUP_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    STARTUP_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    HANG_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    ON_HANG_FIELD_NUMBER: _ClassVar[int]
    IS_ELECTED_FIELD_NUMBER: _ClassVar[int]
    version: str
    unix_s: float
    min_replicas: int
    join_timeout_ms: int
    heal_timeout_ms: int
    startup_timeout_ms: int
    startup_wait_ms: int
    heartbeat_timeout_ms: int
    hang_timeout_ms: int
    on_hang: str
    is_elected: bool
    def __init__(self, version: _Optional[str] = ..., unix_s: _Optional[float] = ..., min_replicas: _Optional[int] = ..., join_timeout_ms: _Optional[int] = ..., heal_timeout_ms: _Optional[int] = ..., startup_timeout_ms: _Optional[int] = ..., startup_wait_ms: _Optional[int] = ..., heartbeat_timeout_ms: _Optional[int] = ..., hang_timeout_ms: _Optional[int] = ..., on_hang: _Optional[str] = ..., is_elected: bool = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("hello", "beat", "question", "leave", "withdrawal")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWAL_FIELD_NUMBER: _ClassVar[int]
    hello: SessionHello
    beat: SessionBeat
    question: SessionQuestion
    leave: SessionLeave
    withdrawal: SessionWithdrawal
    def __init__(self, hello: _Optional[_Union[SessionHello, _Mapping]] = ..., beat: _Optional[_Union[SessionBeat, _Mapping]] = ..., question: _Optional[_Union[SessionQuestion, _Mapping]] = ..., leave: _Optional[_Union[SessionLeave, _Mapping]] = ..., withdrawal: _Optional[_Union[SessionWithdrawal, _Mapping]] = ...) -> None: ...

class SessionHello(_message.Message):
    __slots__ = ("replica_id", "last_quorum_id", "last_max_step", "last_num_groups", "prepared_spare")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_MAX_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    PREPARED_SPARE_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    last_quorum_id: int
    last_max_step: int
    last_num_groups: int
    prepared_spare: bool
    def __init__(self, replica_id: _Optional[str] = ..., last_quorum_id: _Optional[int] = ..., last_max_step: _Optional[int] = ..., last_num_groups: _Optional[int] = ..., prepared_spare: bool = ...) -> None: ...

class SessionBeat(_message.Message):
    __slots__ = ("phase", "step", "phase_ms", "differences", "tally", "events", "received_bytes", "state_bytes")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_MS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    TALLY_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    phase: Phase
    step: int
    phase_ms: int
    differences: _containers.RepeatedCompositeFieldContainer[StateDifference]
    tally: Tally
    events: _containers.RepeatedCompositeFieldContainer[GroupEvent]
    received_bytes: int
    state_bytes: int
    def __init__(self, phase: _Optional[_Union[Phase, str]] = ..., step: _Optional[int] = ..., phase_ms: _Optional[int] = ..., differences: _Optional[_Iterable[_Union[StateDifference, _Mapping]]] = ..., tally: _Optional[_Union[Tally, _Mapping]] = ..., events: _Optional[_Iterable[_Union[GroupEvent, _Mapping]]] = ..., received_bytes: _Optional[int] = ..., state_bytes: _Optional[int] = ...) -> None: ...

class Tally(_message.Message):
    __slots__ = ("committed_s", "discarded_s", "waiting_s", "reconfiguring_s", "healing_s", "away_s", "num_committed", "num_discarded", "ago_s", "step_times")
    COMMITTED_S_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_S_FIELD_NUMBER: _ClassVar[int]
    RECONFIGURING_S_FIELD_NUMBER: _ClassVar[int]
    HEALING_S_FIELD_NUMBER: _ClassVar[int]
    AWAY_S_FIELD_NUMBER: _ClassVar[int]
    NUM_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    NUM_DISCARDED_FIELD_NUMBER: _ClassVar[int]
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    committed_s: float
    discarded_s: float
    waiting_s: float
    reconfiguring_s: float
    healing_s: float
    away_s: float
    num_committed: int
    num_discarded: int
    ago_s: float
    step_times: StepTimes
    def __init__(self, committed_s: _Optional[float] = ..., discarded_s: _Optional[float] = ..., waiting_s: _Optional[float] = ..., reconfiguring_s: _Optional[float] = ..., healing_s: _Optional[float] = ..., away_s: _Optional[float] = ..., num_committed: _Optional[int] = ..., num_discarded: _Optional[int] = ..., ago_s: _Optional[float] = ..., step_times: _Optional[_Union[StepTimes, _Mapping]] = ...) -> None: ...

class StepTimes(_message.Message):
    __slots__ = ("training_s", "updating_s", "between_s", "waiting_s", "num_steps", "group_rank", "load")
    TRAINING_S_FIELD_NUMBER: _ClassVar[int]
    UPDATING_S_FIELD_NUMBER: _ClassVar[int]
    BETWEEN_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_S_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    training_s: float
    updating_s: float
    between_s: float
    waiting_s: float
    num_steps: int
    group_rank: int
    load: float
    def __init__(self, training_s: _Optional[float] = ..., updating_s: _Optional[float] = ..., between_s: _Optional[float] = ..., waiting_s: _Optional[float] = ..., num_steps: _Optional[int] = ..., group_rank: _Optional[int] = ..., load: _Optional[float] = ...) -> None: ...

class GroupEvent(_message.Message):
    __slots__ = ("kind", "source", "number", "ago_s", "quorum_id", "step", "cause", "is_own", "lost", "lasts_s", "paused_s", "reconfigured_s", "healed_s", "healed_bytes")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[GroupEvent.Kind]
        DISCARDED: _ClassVar[GroupEvent.Kind]
        HEAL_FAILED: _ClassVar[GroupEvent.Kind]
        RECOVERED: _ClassVar[GroupEvent.Kind]
        MANAGER_DIED: _ClassVar[GroupEvent.Kind]
        LIGHTHOUSE_AWAY: _ClassVar[GroupEvent.Kind]
    UNKNOWN: GroupEvent.Kind
    DISCARDED: GroupEvent.Kind
    HEAL_FAILED: GroupEvent.Kind
    RECOVERED: GroupEvent.Kind
    MANAGER_DIED: GroupEvent.Kind
    LIGHTHOUSE_AWAY: GroupEvent.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    IS_OWN_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    LASTS_S_FIELD_NUMBER: _ClassVar[int]
    PAUSED_S_FIELD_NUMBER: _ClassVar[int]
    RECONFIGURED_S_FIELD_NUMBER: _ClassVar[int]
    HEALED_S_FIELD_NUMBER: _ClassVar[int]
    HEALED_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: GroupEvent.Kind
    source: str
    number: int
    ago_s: float
    quorum_id: int
    step: int
    cause: str
    is_own: bool
    lost: _containers.RepeatedScalarFieldContainer[str]
    lasts_s: float
    paused_s: float
    reconfigured_s: float
    healed_s: float
    healed_bytes: int
    def __init__(self, kind: _Optional[_Union[GroupEvent.Kind, str]] = ..., source: _Optional[str] = ..., number: _Optional[int] = ..., ago_s: _Optional[float] = ..., quorum_id: _Optional[int] = ..., step: _Optional[int] = ..., cause: _Optional[str] = ..., is_own: bool = ..., lost: _Optional[_Iterable[str]] = ..., lasts_s: _Optional[float] = ..., paused_s: _Optional[float] = ..., reconfigured_s: _Optional[float] = ..., healed_s: _Optional[float] = ..., healed_bytes: _Optional[int] = ...) -> None: ...

class StateDifference(_message.Message):
    __slots__ = ("quorum_id", "step", "sentence")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    step: int
    sentence: str
    def __init__(self, quorum_id: _Optional[int] = ..., step: _Optional[int] = ..., sentence: _Optional[str] = ...) -> None: ...

class SessionWithdrawal(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class SessionLeave(_message.Message):
    __slots__ = ("reason", "between_steps", "ends", "departure")
    REASON_FIELD_NUMBER: _ClassVar[int]
    BETWEEN_STEPS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    DEPARTURE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    between_steps: bool
    ends: bool
    departure: Departure
    def __init__(self, reason: _Optional[str] = ..., between_steps: bool = ..., ends: bool = ..., departure: _Optional[_Union[Departure, str]] = ...) -> None: ...

class SessionQuestion(_message.Message):
    __slots__ = ("requester", "number", "timeout_ms", "agreed")
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    AGREED_FIELD_NUMBER: _ClassVar[int]
    requester: QuorumMember
    number: int
    timeout_ms: int
    agreed: bool
    def __init__(self, requester: _Optional[_Union[QuorumMember, _Mapping]] = ..., number: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., agreed: bool = ...) -> None: ...

class SessionNews(_message.Message):
    __slots__ = ("quorum", "welcome", "refusal", "lost", "kill", "drain", "waiting", "term_ends", "no_quorum_yet", "answers")
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    KILL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    TERM_ENDS_FIELD_NUMBER: _ClassVar[int]
    NO_QUORUM_YET_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    quorum: Quorum
    welcome: SessionWelcome
    refusal: SessionRefusal
    lost: MemberLost
    kill: Kill
    drain: Drain
    waiting: MemberWaiting
    term_ends: TermEnds
    no_quorum_yet: NoQuorumYet
    answers: int
    def __init__(self, quorum: _Optional[_Union[Quorum, _Mapping]] = ..., welcome: _Optional[_Union[SessionWelcome, _Mapping]] = ..., refusal: _Optional[_Union[SessionRefusal, _Mapping]] = ..., lost: _Optional[_Union[MemberLost, _Mapping]] = ..., kill: _Optional[_Union[Kill, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., waiting: _Optional[_Union[MemberWaiting, _Mapping]] = ..., term_ends: _Optional[_Union[TermEnds, _Mapping]] = ..., no_quorum_yet: _Optional[_Union[NoQuorumYet, _Mapping]] = ..., answers: _Optional[int] = ...) -> None: ...

class SessionWelcome(_message.Message):
    __slots__ = ("min_interval_ms", "knows_prepared_spares")
    MIN_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    KNOWS_PREPARED_SPARES_FIELD_NUMBER: _ClassVar[int]
    min_interval_ms: int
    knows_prepared_spares: bool
    def __init__(self, min_interval_ms: _Optional[int] = ..., knows_prepared_spares: bool = ...) -> None: ...

class SessionRefusal(_message.Message):
    __slots__ = ("number", "error", "reason")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    number: int
    error: str
    reason: str
    def __init__(self, number: _Optional[int] = ..., error: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class MemberLost(_message.Message):
    __slots__ = ("replica_id", "reason", "quorum_id")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    reason: str
    quorum_id: int
    def __init__(self, replica_id: _Optional[str] = ..., reason: _Optional[str] = ..., quorum_id: _Optional[int] = ...) -> None: ...

class TermEnds(_message.Message):
    __slots__ = ("quorum_id", "step", "reason")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    step: int
    reason: str
    def __init__(self, quorum_id: _Optional[int] = ..., step: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class MemberWaiting(_message.Message):
    __slots__ = ("replica_id",)
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    def __init__(self, replica_id: _Optional[str] = ...) -> None: ...

class NoQuorumYet(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Kill(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("reason", "within_ms")
    REASON_FIELD_NUMBER: _ClassVar[int]
    WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    within_ms: int
    def __init__(self, reason: _Optional[str] = ..., within_ms: _Optional[int] = ...) -> None: ...

class AgentRequest(_message.Message):
    __slots__ = ("hello", "state", "leave", "move")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    hello: AgentHello
    state: AgentState
    leave: AgentLeave
    move: RunMove
    def __init__(self, hello: _Optional[_Union[AgentHello, _Mapping]] = ..., state: _Optional[_Union[AgentState, _Mapping]] = ..., leave: _Optional[_Union[AgentLeave, _Mapping]] = ..., move: _Optional[_Union[RunMove, _Mapping]] = ...) -> None: ...

class AgentHello(_message.Message):
    __slots__ = ("run_id", "node", "settings", "state", "world")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    node: Node
    settings: RunSettings
    state: AgentState
    world: bytes
    def __init__(self, run_id: _Optional[str] = ..., node: _Optional[_Union[Node, _Mapping]] = ..., settings: _Optional[_Union[RunSettings, _Mapping]] = ..., state: _Optional[_Union[AgentState, _Mapping]] = ..., world: _Optional[bytes] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("node_id", "host", "num_workers", "role", "rank")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    host: str
    num_workers: int
    role: str
    rank: int
    def __init__(self, node_id: _Optional[str] = ..., host: _Optional[str] = ..., num_workers: _Optional[int] = ..., role: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class RunSettings(_message.Message):
    __slots__ = ("min_nodes", "max_nodes", "join_timeout_ms", "join_window_ms", "max_run_failures", "max_node_failures", "failure_window_ms", "waits_for_lost", "is_soft")
    MIN_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    JOIN_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    JOIN_WINDOW_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUN_FAILURES_FIELD_NUMBER: _ClassVar[int]
    MAX_NODE_FAILURES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_WINDOW_MS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_LOST_FIELD_NUMBER: _ClassVar[int]
    IS_SOFT_FIELD_NUMBER: _ClassVar[int]
    min_nodes: int
    max_nodes: int
    join_timeout_ms: int
    join_window_ms: int
    max_run_failures: int
    max_node_failures: int
    failure_window_ms: int
    waits_for_lost: bool
    is_soft: bool
    def __init__(self, min_nodes: _Optional[int] = ..., max_nodes: _Optional[int] = ..., join_timeout_ms: _Optional[int] = ..., join_window_ms: _Optional[int] = ..., max_run_failures: _Optional[int] = ..., max_node_failures: _Optional[int] = ..., failure_window_ms: _Optional[int] = ..., waits_for_lost: bool = ..., is_soft: bool = ...) -> None: ...

class AgentState(_message.Message):
    __slots__ = ("status", "round", "reached", "store_port", "can_warm_up", "num_restarts", "num_failures", "trained_since", "trained_until", "paused")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    CAN_WARM_UP_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILURES_FIELD_NUMBER: _ClassVar[int]
    TRAINED_SINCE_FIELD_NUMBER: _ClassVar[int]
    TRAINED_UNTIL_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    status: AgentStatus
    round: int
    reached: bool
    store_port: int
    can_warm_up: bool
    num_restarts: int
    num_failures: int
    trained_since: int
    trained_until: int
    paused: bool
    def __init__(self, status: _Optional[_Union[AgentStatus, str]] = ..., round: _Optional[int] = ..., reached: bool = ..., store_port: _Optional[int] = ..., can_warm_up: bool = ..., num_restarts: _Optional[int] = ..., num_failures: _Optional[int] = ..., trained_since: _Optional[int] = ..., trained_until: _Optional[int] = ..., paused: bool = ...) -> None: ...

class AgentLeave(_message.Message):
    __slots__ = ("reason", "failed", "closes", "final")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    reason: str
    failed: bool
    closes: bool
    final: bool
    def __init__(self, reason: _Optional[str] = ..., failed: bool = ..., closes: bool = ..., final: bool = ...) -> None: ...

class RunMove(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class AgentNews(_message.Message):
    __slots__ = ("welcome", "world", "warm_up", "paused", "waiting", "closed", "move", "reached")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    WARM_UP_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    welcome: AgentWelcome
    world: World
    warm_up: WarmUp
    paused: WorldPaused
    waiting: RunWaiting
    closed: RunClosed
    move: RunMove
    reached: WorldReached
    def __init__(self, welcome: _Optional[_Union[AgentWelcome, _Mapping]] = ..., world: _Optional[_Union[World, _Mapping]] = ..., warm_up: _Optional[_Union[WarmUp, _Mapping]] = ..., paused: _Optional[_Union[WorldPaused, _Mapping]] = ..., waiting: _Optional[_Union[RunWaiting, _Mapping]] = ..., closed: _Optional[_Union[RunClosed, _Mapping]] = ..., move: _Optional[_Union[RunMove, _Mapping]] = ..., reached: _Optional[_Union[WorldReached, _Mapping]] = ...) -> None: ...

class AgentWelcome(_message.Message):
    __slots__ = ("beat_interval_ms",)
    BEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    beat_interval_ms: int
    def __init__(self, beat_interval_ms: _Optional[int] = ...) -> None: ...

class World(_message.Message):
    __slots__ = ("round", "nodes", "master_port")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    MASTER_PORT_FIELD_NUMBER: _ClassVar[int]
    round: int
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    master_port: int
    def __init__(self, round: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., master_port: _Optional[int] = ...) -> None: ...

class WarmUp(_message.Message):
    __slots__ = ("expected",)
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    expected: World
    def __init__(self, expected: _Optional[_Union[World, _Mapping]] = ...) -> None: ...

class WorldReached(_message.Message):
    __slots__ = ("round",)
    ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    def __init__(self, round: _Optional[int] = ...) -> None: ...

class WorldPaused(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class RunWaiting(_message.Message):
    __slots__ = ("reason", "num_failures")
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILURES_FIELD_NUMBER: _ClassVar[int]
    reason: str
    num_failures: int
    def __init__(self, reason: _Optional[str] = ..., num_failures: _Optional[int] = ...) -> None: ...

class RunClosed(_message.Message):
    __slots__ = ("reason", "failed", "drained", "within_ms", "final")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    reason: str
    failed: bool
    drained: bool
    within_ms: int
    final: bool
    def __init__(self, reason: _Optional[str] = ..., failed: bool = ..., drained: bool = ..., within_ms: _Optional[int] = ..., final: bool = ...) -> None: ...

class LighthouseStatusRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class LighthouseStatusResponse(_message.Message):
    __slots__ = ("jobs", "runs")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobStatus]
    runs: _containers.RepeatedCompositeFieldContainer[RunStatus]
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobStatus, _Mapping]]] = ..., runs: _Optional[_Iterable[_Union[RunStatus, _Mapping]]] = ...) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("run", "round", "min_nodes", "max_nodes", "phase", "why", "nodes")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MIN_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    min_nodes: int
    max_nodes: int
    phase: str
    why: str
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., min_nodes: _Optional[int] = ..., max_nodes: _Optional[int] = ..., phase: _Optional[str] = ..., why: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node_id", "host", "node_rank", "num_workers", "status", "reached", "num_restarts", "silent_ms", "waits_ms")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    NODE_RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    SILENT_MS_FIELD_NUMBER: _ClassVar[int]
    WAITS_MS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    host: str
    node_rank: int
    num_workers: int
    status: AgentStatus
    reached: bool
    num_restarts: int
    silent_ms: int
    waits_ms: int
    def __init__(self, node_id: _Optional[str] = ..., host: _Optional[str] = ..., node_rank: _Optional[int] = ..., num_workers: _Optional[int] = ..., status: _Optional[_Union[AgentStatus, str]] = ..., reached: bool = ..., num_restarts: _Optional[int] = ..., silent_ms: _Optional[int] = ..., waits_ms: _Optional[int] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job", "quorum_id", "committed_step", "min_replicas", "waiting_for", "groups", "num_expected", "num_discarded", "num_heals", "stalled_ms", "gone", "ended_ms", "finished", "num_differences", "last_difference", "goodput", "copy_step", "num_holders", "prepared_spares", "num_places", "copy_age_ms")
    JOB_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPECTED_FIELD_NUMBER: _ClassVar[int]
    NUM_DISCARDED_FIELD_NUMBER: _ClassVar[int]
    NUM_HEALS_FIELD_NUMBER: _ClassVar[int]
    STALLED_MS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    ENDED_MS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    LAST_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_FIELD_NUMBER: _ClassVar[int]
    COPY_STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_HOLDERS_FIELD_NUMBER: _ClassVar[int]
    PREPARED_SPARES_FIELD_NUMBER: _ClassVar[int]
    NUM_PLACES_FIELD_NUMBER: _ClassVar[int]
    COPY_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    job: str
    quorum_id: int
    committed_step: int
    min_replicas: int
    waiting_for: str
    groups: _containers.RepeatedCompositeFieldContainer[GroupStatus]
    num_expected: int
    num_discarded: int
    num_heals: int
    stalled_ms: int
    gone: _containers.RepeatedCompositeFieldContainer[GoneGroup]
    ended_ms: int
    finished: bool
    num_differences: int
    last_difference: str
    goodput: Goodput
    copy_step: int
    num_holders: int
    prepared_spares: _containers.RepeatedCompositeFieldContainer[PreparedSpare]
    num_places: int
    copy_age_ms: int
    def __init__(self, job: _Optional[str] = ..., quorum_id: _Optional[int] = ..., committed_step: _Optional[int] = ..., min_replicas: _Optional[int] = ..., waiting_for: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[GroupStatus, _Mapping]]] = ..., num_expected: _Optional[int] = ..., num_discarded: _Optional[int] = ..., num_heals: _Optional[int] = ..., stalled_ms: _Optional[int] = ..., gone: _Optional[_Iterable[_Union[GoneGroup, _Mapping]]] = ..., ended_ms: _Optional[int] = ..., finished: bool = ..., num_differences: _Optional[int] = ..., last_difference: _Optional[str] = ..., goodput: _Optional[_Union[Goodput, _Mapping]] = ..., copy_step: _Optional[int] = ..., num_holders: _Optional[int] = ..., prepared_spares: _Optional[_Iterable[_Union[PreparedSpare, _Mapping]]] = ..., num_places: _Optional[int] = ..., copy_age_ms: _Optional[int] = ...) -> None: ...

class PreparedSpare(_message.Message):
    __slots__ = ("replica_id", "asks", "silent_ms")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    SILENT_MS_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    asks: bool
    silent_ms: int
    def __init__(self, replica_id: _Optional[str] = ..., asks: bool = ..., silent_ms: _Optional[int] = ...) -> None: ...

class LighthouseIncidentsRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: int
    def __init__(self, after: _Optional[int] = ...) -> None: ...

class LighthouseIncidentsResponse(_message.Message):
    __slots__ = ("incidents", "goodput")
    INCIDENTS_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_FIELD_NUMBER: _ClassVar[int]
    incidents: _containers.RepeatedCompositeFieldContainer[Incident]
    goodput: Goodput
    def __init__(self, incidents: _Optional[_Iterable[_Union[Incident, _Mapping]]] = ..., goodput: _Optional[_Union[Goodput, _Mapping]] = ...) -> None: ...

class Incident(_message.Message):
    __slots__ = ("number", "job", "kind", "cause", "groups", "at", "quorum_id", "step", "is_open", "detected_after_s", "decided_after_s", "paused_s", "reconfigured_s", "healed_s", "healed_bytes", "first_commit_after_s", "steps_discarded")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    IS_OPEN_FIELD_NUMBER: _ClassVar[int]
    DETECTED_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    DECIDED_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    PAUSED_S_FIELD_NUMBER: _ClassVar[int]
    RECONFIGURED_S_FIELD_NUMBER: _ClassVar[int]
    HEALED_S_FIELD_NUMBER: _ClassVar[int]
    HEALED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_COMMIT_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_DISCARDED_FIELD_NUMBER: _ClassVar[int]
    number: int
    job: str
    kind: str
    cause: str
    groups: _containers.RepeatedScalarFieldContainer[str]
    at: float
    quorum_id: int
    step: int
    is_open: bool
    detected_after_s: float
    decided_after_s: float
    paused_s: float
    reconfigured_s: float
    healed_s: float
    healed_bytes: int
    first_commit_after_s: float
    steps_discarded: int
    def __init__(self, number: _Optional[int] = ..., job: _Optional[str] = ..., kind: _Optional[str] = ..., cause: _Optional[str] = ..., groups: _Optional[_Iterable[str]] = ..., at: _Optional[float] = ..., quorum_id: _Optional[int] = ..., step: _Optional[int] = ..., is_open: bool = ..., detected_after_s: _Optional[float] = ..., decided_after_s: _Optional[float] = ..., paused_s: _Optional[float] = ..., reconfigured_s: _Optional[float] = ..., healed_s: _Optional[float] = ..., healed_bytes: _Optional[int] = ..., first_commit_after_s: _Optional[float] = ..., steps_discarded: _Optional[int] = ...) -> None: ...

class Goodput(_message.Message):
    __slots__ = ("wall_s", "committed_s", "lost_s", "ratio")
    class LostSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_S_FIELD_NUMBER: _ClassVar[int]
    LOST_S_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    wall_s: float
    committed_s: float
    lost_s: _containers.ScalarMap[str, float]
    ratio: float
    def __init__(self, wall_s: _Optional[float] = ..., committed_s: _Optional[float] = ..., lost_s: _Optional[_Mapping[str, float]] = ..., ratio: _Optional[float] = ...) -> None: ...

class GoneGroup(_message.Message):
    __slots__ = ("replica_id", "reason", "orderly", "gone_ms")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ORDERLY_FIELD_NUMBER: _ClassVar[int]
    GONE_MS_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    reason: str
    orderly: bool
    gone_ms: int
    def __init__(self, replica_id: _Optional[str] = ..., reason: _Optional[str] = ..., orderly: bool = ..., gone_ms: _Optional[int] = ...) -> None: ...

class GroupStatus(_message.Message):
    __slots__ = ("replica_id", "address", "in_quorum", "asking", "step", "phase", "phase_ms", "silent_ms", "hung", "left_out", "received_bytes", "state_bytes", "paces", "slow", "slowest_rank")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IN_QUORUM_FIELD_NUMBER: _ClassVar[int]
    ASKING_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PHASE_MS_FIELD_NUMBER: _ClassVar[int]
    SILENT_MS_FIELD_NUMBER: _ClassVar[int]
    HUNG_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PACES_FIELD_NUMBER: _ClassVar[int]
    SLOW_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_RANK_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    address: str
    in_quorum: bool
    asking: bool
    step: int
    phase: Phase
    phase_ms: int
    silent_ms: int
    hung: bool
    left_out: bool
    received_bytes: int
    state_bytes: int
    paces: _containers.RepeatedCompositeFieldContainer[Pace]
    slow: bool
    slowest_rank: int
    def __init__(self, replica_id: _Optional[str] = ..., address: _Optional[str] = ..., in_quorum: bool = ..., asking: bool = ..., step: _Optional[int] = ..., phase: _Optional[_Union[Phase, str]] = ..., phase_ms: _Optional[int] = ..., silent_ms: _Optional[int] = ..., hung: bool = ..., left_out: bool = ..., received_bytes: _Optional[int] = ..., state_bytes: _Optional[int] = ..., paces: _Optional[_Iterable[_Union[Pace, _Mapping]]] = ..., slow: bool = ..., slowest_rank: _Optional[int] = ...) -> None: ...

class Pace(_message.Message):
    __slots__ = ("phase", "seconds", "to_best", "to_own_best")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TO_BEST_FIELD_NUMBER: _ClassVar[int]
    TO_OWN_BEST_FIELD_NUMBER: _ClassVar[int]
    phase: str
    seconds: float
    to_best: float
    to_own_best: float
    def __init__(self, phase: _Optional[str] = ..., seconds: _Optional[float] = ..., to_best: _Optional[float] = ..., to_own_best: _Optional[float] = ...) -> None: ...

class AcceptLossRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AcceptLossResponse(_message.Message):
    __slots__ = ("committed_step",)
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    committed_step: int
    def __init__(self, committed_step: _Optional[int] = ...) -> None: ...

class LighthouseKillRequest(_message.Message):
    __slots__ = ("replica_id", "reason")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    reason: str
    def __init__(self, replica_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class LighthouseKillResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LighthouseDrainRequest(_message.Message):
    __slots__ = ("replica_id", "reason", "node", "within_ms")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    reason: str
    node: str
    within_ms: int
    def __init__(self, replica_id: _Optional[str] = ..., reason: _Optional[str] = ..., node: _Optional[str] = ..., within_ms: _Optional[int] = ...) -> None: ...

class LighthouseDrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ManagerQuorumRequest(_message.Message):
    __slots__ = ("rank", "step", "checkpoint_server_addr", "shrink_only", "commit_failures", "init_sync", "worker_id", "drain_reason", "unhealed", "last_quorum_id", "last_num_groups", "layout", "step_quorum_id", "steady", "agreed", "last_round", "question")
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_SERVER_ADDR_FIELD_NUMBER: _ClassVar[int]
    SHRINK_ONLY_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    INIT_SYNC_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DRAIN_REASON_FIELD_NUMBER: _ClassVar[int]
    UNHEALED_FIELD_NUMBER: _ClassVar[int]
    LAST_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    STEP_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    STEADY_FIELD_NUMBER: _ClassVar[int]
    AGREED_FIELD_NUMBER: _ClassVar[int]
    LAST_ROUND_FIELD_NUMBER: _ClassVar[int]
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    rank: int
    step: int
    checkpoint_server_addr: str
    shrink_only: bool
    commit_failures: int
    init_sync: bool
    worker_id: str
    drain_reason: str
    unhealed: bool
    last_quorum_id: int
    last_num_groups: int
    layout: str
    step_quorum_id: int
    steady: bool
    agreed: bool
    last_round: int
    question: int
    def __init__(self, rank: _Optional[int] = ..., step: _Optional[int] = ..., checkpoint_server_addr: _Optional[str] = ..., shrink_only: bool = ..., commit_failures: _Optional[int] = ..., init_sync: bool = ..., worker_id: _Optional[str] = ..., drain_reason: _Optional[str] = ..., unhealed: bool = ..., last_quorum_id: _Optional[int] = ..., last_num_groups: _Optional[int] = ..., layout: _Optional[str] = ..., step_quorum_id: _Optional[int] = ..., steady: bool = ..., agreed: bool = ..., last_round: _Optional[int] = ..., question: _Optional[int] = ...) -> None: ...

class ManagerQuorumResponse(_message.Message):
    __slots__ = ("quorum_id", "recover_src_manager_address", "store_address", "max_step", "max_replica_rank", "max_world_size", "replica_rank", "replica_world_size", "heal", "recover_src_replica_rank", "recover_dst_replica_ranks", "commit_failures", "replica_ids", "round", "recover_extra_src_manager_addresses", "recover_extra_dst_replica_ranks", "steady", "group_rank")
    QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    RECOVER_SRC_MANAGER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLICA_RANK_FIELD_NUMBER: _ClassVar[int]
    MAX_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_RANK_FIELD_NUMBER: _ClassVar[int]
    REPLICA_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEAL_FIELD_NUMBER: _ClassVar[int]
    RECOVER_SRC_REPLICA_RANK_FIELD_NUMBER: _ClassVar[int]
    RECOVER_DST_REPLICA_RANKS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    REPLICA_IDS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RECOVER_EXTRA_SRC_MANAGER_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    RECOVER_EXTRA_DST_REPLICA_RANKS_FIELD_NUMBER: _ClassVar[int]
    STEADY_FIELD_NUMBER: _ClassVar[int]
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    quorum_id: int
    recover_src_manager_address: str
    store_address: str
    max_step: int
    max_replica_rank: int
    max_world_size: int
    replica_rank: int
    replica_world_size: int
    heal: bool
    recover_src_replica_rank: int
    recover_dst_replica_ranks: _containers.RepeatedScalarFieldContainer[int]
    commit_failures: int
    replica_ids: _containers.RepeatedScalarFieldContainer[str]
    round: int
    recover_extra_src_manager_addresses: _containers.RepeatedScalarFieldContainer[str]
    recover_extra_dst_replica_ranks: _containers.RepeatedScalarFieldContainer[int]
    steady: bool
    group_rank: int
    def __init__(self, quorum_id: _Optional[int] = ..., recover_src_manager_address: _Optional[str] = ..., store_address: _Optional[str] = ..., max_step: _Optional[int] = ..., max_replica_rank: _Optional[int] = ..., max_world_size: _Optional[int] = ..., replica_rank: _Optional[int] = ..., replica_world_size: _Optional[int] = ..., heal: bool = ..., recover_src_replica_rank: _Optional[int] = ..., recover_dst_replica_ranks: _Optional[_Iterable[int]] = ..., commit_failures: _Optional[int] = ..., replica_ids: _Optional[_Iterable[str]] = ..., round: _Optional[int] = ..., recover_extra_src_manager_addresses: _Optional[_Iterable[str]] = ..., recover_extra_dst_replica_ranks: _Optional[_Iterable[int]] = ..., steady: bool = ..., group_rank: _Optional[int] = ...) -> None: ...

class CheckpointAddressRequest(_message.Message):
    __slots__ = ("rank",)
    RANK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    def __init__(self, rank: _Optional[int] = ...) -> None: ...

class CheckpointAddressResponse(_message.Message):
    __slots__ = ("checkpoint_server_address",)
    CHECKPOINT_SERVER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    checkpoint_server_address: str
    def __init__(self, checkpoint_server_address: _Optional[str] = ...) -> None: ...

class JobMembersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JobMembersResponse(_message.Message):
    __slots__ = ("manager_addresses", "committed_step", "replica_ids", "copies", "knows_copies", "is_finished")
    MANAGER_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    REPLICA_IDS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    KNOWS_COPIES_FIELD_NUMBER: _ClassVar[int]
    IS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    manager_addresses: _containers.RepeatedScalarFieldContainer[str]
    committed_step: int
    replica_ids: _containers.RepeatedScalarFieldContainer[str]
    copies: _containers.RepeatedCompositeFieldContainer[HeldCopy]
    knows_copies: bool
    is_finished: bool
    def __init__(self, manager_addresses: _Optional[_Iterable[str]] = ..., committed_step: _Optional[int] = ..., replica_ids: _Optional[_Iterable[str]] = ..., copies: _Optional[_Iterable[_Union[HeldCopy, _Mapping]]] = ..., knows_copies: bool = ..., is_finished: bool = ...) -> None: ...

class HeldCopy(_message.Message):
    __slots__ = ("step", "step_quorum_id", "group_rank", "group_world_size", "address")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_QUORUM_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    GROUP_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    step: int
    step_quorum_id: int
    group_rank: int
    group_world_size: int
    address: str
    def __init__(self, step: _Optional[int] = ..., step_quorum_id: _Optional[int] = ..., group_rank: _Optional[int] = ..., group_world_size: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class ReportCopiesRequest(_message.Message):
    __slots__ = ("holder", "copies")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    holder: str
    copies: _containers.RepeatedCompositeFieldContainer[HeldCopy]
    def __init__(self, holder: _Optional[str] = ..., copies: _Optional[_Iterable[_Union[HeldCopy, _Mapping]]] = ...) -> None: ...

class ShouldCommitRequest(_message.Message):
    __slots__ = ("should_commit", "rank", "step", "round", "worker_id", "wish")
    SHOULD_COMMIT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WISH_FIELD_NUMBER: _ClassVar[int]
    should_commit: bool
    rank: int
    step: int
    round: int
    worker_id: str
    wish: Wish
    def __init__(self, should_commit: bool = ..., rank: _Optional[int] = ..., step: _Optional[int] = ..., round: _Optional[int] = ..., worker_id: _Optional[str] = ..., wish: _Optional[_Union[Wish, str]] = ...) -> None: ...

class ShouldCommitResponse(_message.Message):
    __slots__ = ("should_commit", "fate")
    SHOULD_COMMIT_FIELD_NUMBER: _ClassVar[int]
    FATE_FIELD_NUMBER: _ClassVar[int]
    should_commit: bool
    fate: Fate
    def __init__(self, should_commit: bool = ..., fate: _Optional[_Union[Fate, str]] = ...) -> None: ...

class KillRequest(_message.Message):
    __slots__ = ("msg",)
    MSG_FIELD_NUMBER: _ClassVar[int]
    msg: str
    def __init__(self, msg: _Optional[str] = ...) -> None: ...

class KillResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("reason", "within_ms")
    REASON_FIELD_NUMBER: _ClassVar[int]
    WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    within_ms: int
    def __init__(self, reason: _Optional[str] = ..., within_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("hello", "detach", "phase", "vote", "withdrawal", "ping", "difference", "event")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWAL_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    hello: AttachHello
    detach: AttachDetach
    phase: AttachPhase
    vote: AttachVote
    withdrawal: AttachWithdrawal
    ping: AttachPing
    difference: StateDifference
    event: GroupEvent
    def __init__(self, hello: _Optional[_Union[AttachHello, _Mapping]] = ..., detach: _Optional[_Union[AttachDetach, _Mapping]] = ..., phase: _Optional[_Union[AttachPhase, _Mapping]] = ..., vote: _Optional[_Union[AttachVote, _Mapping]] = ..., withdrawal: _Optional[_Union[AttachWithdrawal, _Mapping]] = ..., ping: _Optional[_Union[AttachPing, _Mapping]] = ..., difference: _Optional[_Union[StateDifference, _Mapping]] = ..., event: _Optional[_Union[GroupEvent, _Mapping]] = ...) -> None: ...

class AttachHello(_message.Message):
    __slots__ = ("rank", "worker_id")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    rank: int
    worker_id: str
    def __init__(self, rank: _Optional[int] = ..., worker_id: _Optional[str] = ...) -> None: ...

class AttachDetach(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: str
    def __init__(self, failure: _Optional[str] = ...) -> None: ...

class AttachPhase(_message.Message):
    __slots__ = ("phase", "step", "went_on_to", "round_before", "tally", "received_bytes", "state_bytes")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WENT_ON_TO_FIELD_NUMBER: _ClassVar[int]
    ROUND_BEFORE_FIELD_NUMBER: _ClassVar[int]
    TALLY_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    phase: Phase
    step: int
    went_on_to: int
    round_before: int
    tally: Tally
    received_bytes: int
    state_bytes: int
    def __init__(self, phase: _Optional[_Union[Phase, str]] = ..., step: _Optional[int] = ..., went_on_to: _Optional[int] = ..., round_before: _Optional[int] = ..., tally: _Optional[_Union[Tally, _Mapping]] = ..., received_bytes: _Optional[int] = ..., state_bytes: _Optional[int] = ...) -> None: ...

class AttachVote(_message.Message):
    __slots__ = ("vote", "number", "timeout_ms")
    VOTE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    vote: ShouldCommitRequest
    number: int
    timeout_ms: int
    def __init__(self, vote: _Optional[_Union[ShouldCommitRequest, _Mapping]] = ..., number: _Optional[int] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class AttachWithdrawal(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class AttachPing(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class AttachNews(_message.Message):
    __slots__ = ("welcome", "lost", "kill", "drain", "waiting", "over", "term_ends", "decision", "pong", "no_quorum_yet")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    KILL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    TERM_ENDS_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    NO_QUORUM_YET_FIELD_NUMBER: _ClassVar[int]
    welcome: AttachWelcome
    lost: MemberLost
    kill: Kill
    drain: Drain
    waiting: MemberWaiting
    over: AttachOver
    term_ends: TermEnds
    decision: AttachDecision
    pong: AttachPong
    no_quorum_yet: NoQuorumYet
    def __init__(self, welcome: _Optional[_Union[AttachWelcome, _Mapping]] = ..., lost: _Optional[_Union[MemberLost, _Mapping]] = ..., kill: _Optional[_Union[Kill, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., waiting: _Optional[_Union[MemberWaiting, _Mapping]] = ..., over: _Optional[_Union[AttachOver, _Mapping]] = ..., term_ends: _Optional[_Union[TermEnds, _Mapping]] = ..., decision: _Optional[_Union[AttachDecision, _Mapping]] = ..., pong: _Optional[_Union[AttachPong, _Mapping]] = ..., no_quorum_yet: _Optional[_Union[NoQuorumYet, _Mapping]] = ...) -> None: ...

class AttachWelcome(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachDecision(_message.Message):
    __slots__ = ("number", "decided", "error", "reason")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    number: int
    decided: ShouldCommitResponse
    error: str
    reason: str
    def __init__(self, number: _Optional[int] = ..., decided: _Optional[_Union[ShouldCommitResponse, _Mapping]] = ..., error: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class AttachPong(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class AttachOver(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...
