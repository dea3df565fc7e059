"""Feeds both services' handlers with bytes that no client of ours sends: only our errors come out.

Everything runs in this process, without sockets: parsing, translation, the drivers and the cores
are real, gRPC's context is replaced by one that answers what a handler asks.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from torchft_svc.core.launch.world import (
    MAX_NODES,
    AgentWelcome,
    RunMove,
    WarmUp,
    World,
    WorldReached,
)
from torchft_svc.core.limits import MAX_NAME_LENGTH
from torchft_svc.core.quorum.manager.group import Group
from torchft_svc.core.quorum.types import Member, QuorumConfig
from torchft_svc.errors import QuorumFailed, TorchFTError
from torchft_svc.host.tasks import Tasks
from torchft_svc.lighthouse_server.driver import LighthouseDriver
from torchft_svc.lighthouse_server.servicer import lighthouse_service
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.driver import ManagerDriver
from torchft_svc.manager_server.link import LighthouseLink
from torchft_svc.manager_server.servicer import manager_service
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import JOB_KEY, quorum_from_wire, quorum_result_from_wire
from torchft_svc.rpc.codec_rendezvous import world_news_from_wire
from torchft_svc.rpc.parsing import parser, refusing_garbage, refusing_garbage_in_stream
from torchft_svc.rpc.serving import Service

MANY = settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
# A refusal is one line of a log, whatever it is about.
MAX_SENTENCE = 1000
# Of the lighthouse under test; a call that is answered at once leaves one behind.
MAX_JOBS = 500
WITH_QUORUM = (pb.LighthouseQuorumResponse, pb.SessionNews)
# A handler without any time left has answered by then.
ANSWER_S = 10.0

_TEXTS = ("", "a:1", "a:1", "a:1", "a:2", "b:1", "é:1", "a\nb", "\x00", "\x1b[2J", "x" * 2000)
_INTS = (0, 0, 0, 1, 1, 2, 3, -1, 1000, 2**31, 2**62, 2**63 - 1, -(2**63))


class Context:
    """Stands in for gRPC's: a call of a job of its own, with no time to wait for others."""

    _numbers = itertools.count()

    def __init__(self, answer_type: Any) -> None:
        self._answer_of = answer_type
        self._job = f"hostile-{next(self._numbers) % MAX_JOBS}"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((JOB_KEY, self._job),)

    def time_remaining(self) -> float:
        return 0.001

    async def write(self, news: bytes) -> None:
        check_shown(self._answer_of.FromString(news))


def check_shown(answer: Any) -> None:
    """What others receive about a group is within the limits."""
    for member in answer.quorum.participants if isinstance(answer, WITH_QUORUM) else ():
        assert 0 < len(member.replica_id) <= MAX_NAME_LENGTH
        assert (member.replica_id + member.address).isprintable()
        assert min(member.step, member.commit_failures) >= 0


def wild(kind: Any, chance: random.Random) -> Any:
    """A message of ``kind`` with any value in any field, and often with those of a good client."""
    described = kind.DESCRIPTOR
    kinds = [field for oneof in described.oneofs for field in oneof.fields]
    fields = [chance.choice(kinds)] if len(kinds) > 1 else described.fields
    message = kind()
    for field in fields:
        if len(fields) > 1 and chance.random() < 0.3:
            continue
        if field.is_repeated:
            values = [_value(field, chance) for _ in range(chance.randrange(4))]
            getattr(message, field.name).extend(values)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(_value(field, chance))
        else:
            setattr(message, field.name, _value(field, chance))
    return message


def _value(field: FieldDescriptor, chance: random.Random) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_MESSAGE:
            return wild(GetMessageClass(field.message_type), chance)
        case FieldDescriptor.TYPE_STRING:
            return chance.choice(_TEXTS)
        case FieldDescriptor.TYPE_BYTES:
            return wild(pb.World, chance).SerializeToString()
        case FieldDescriptor.TYPE_BOOL:
            return chance.random() < 0.5
        case FieldDescriptor.TYPE_INT64:
            return chance.choice(_INTS)
        case FieldDescriptor.TYPE_UINT64:
            return abs(chance.choice(_INTS))
        case _:
            return chance.randrange(10)


def encoded(kind: Any) -> st.SearchStrategy[bytes]:
    """Wild messages of ``kind``, such with bytes changed, added and cut, and noise."""

    def make(chance: random.Random) -> bytes:
        raw: bytes = wild(kind, chance).SerializeToString()
        way = chance.randrange(8)
        for _ in range(chance.randrange(1, 4) if way == 0 else 0):
            start = chance.randrange(len(raw) + 1)
            cut = start + chance.randrange(9)
            raw = raw[:start] + chance.randbytes(chance.randrange(9)) + raw[cut:]
        return chance.randbytes(chance.randrange(100)) if way == 1 else raw

    # Uniform: what hypothesis draws by itself is mostly empty messages.
    return st.randoms(use_true_random=True).map(make)


class Served:
    """A service's handlers on a loop of their own, as `rpc.serving` wires them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, service: Service) -> None:
        self._loop = loop
        self.methods = pb.DESCRIPTOR.services_by_name[service.name].methods_by_name
        self._calls = {name: refusing_garbage(call) for name, call in service.handlers.items()}
        self._streams = {
            name: refusing_garbage_in_stream(call) for name, call in service.streams.items()
        }

    def parse(self, method: str, raw: bytes) -> Any:
        return parser(getattr(pb, self.methods[method].input_type.name))(raw)

    def call(self, method: str, raw: bytes) -> None:
        """Expect an answer that can be read, or an error of ours in one line."""
        answer_type = self._answer_of(method)
        answer = self._run(
            lambda: self._calls[method](self.parse(method, raw), Context(answer_type))
        )
        if answer is not None:
            check_shown(answer_type.FromString(answer))

    def stream(self, method: str, messages: list[bytes]) -> None:
        parsed = [self.parse(method, raw) for raw in messages]
        context = Context(self._answer_of(method))
        self._run(lambda: self._streams[method](_given(parsed), context))

    def _answer_of(self, method: str) -> Any:
        return getattr(pb, self.methods[method].output_type.name)

    def _run(self, work: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        async def answered() -> bytes | None:
            return await asyncio.wait_for(work(), ANSWER_S)

        try:
            return self._loop.run_until_complete(answered())
        except TorchFTError as error:
            sentence = str(error)
        assert sentence.isprintable(), repr(sentence)
        assert 0 < len(sentence) <= MAX_SENTENCE, sentence
        return None


async def _given(messages: list[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def driver(loop: asyncio.AbstractEventLoop) -> Iterator[LighthouseDriver]:
    """A lighthouse that has to serve another job when the garbage is over."""
    driver = LighthouseDriver(QuorumConfig(join_timeout_s=0.05, max_jobs=MAX_JOBS + 1))
    yield driver
    assert len(driver.runs.status("")) <= MAX_JOBS + 1
    member = Member(replica_id="good:1", step=1)
    assert loop.run_until_complete(driver.quorum("good", member, ANSWER_S))
    driver.close()


@pytest.fixture
def lighthouse(loop: asyncio.AbstractEventLoop, driver: LighthouseDriver) -> Served:
    return Served(loop, lighthouse_service(driver))


@pytest.fixture
def manager(loop: asyncio.AbstractEventLoop) -> Iterator[Served]:
    """The manager of a group of three, at a lighthouse that nobody can reach."""
    config = ManagerConfig(
        lighthouse_address="127.0.0.1:1",
        replica_name="g",
        group_world_size=3,
        store_address="127.0.0.1:1",
        connect_timeout_s=0.001,
    )
    tasks = Tasks()

    async def start() -> LighthouseLink:
        return LighthouseLink(config, tasks)

    async def stop() -> None:
        async with tasks:
            pass

    link = loop.run_until_complete(start())
    driver = ManagerDriver(Group(3), link, tasks)
    yield Served(loop, manager_service(driver))
    loop.run_until_complete(stop())


def inputs(service: str, *, streams: bool) -> Mapping[str, st.SearchStrategy[bytes]]:
    """What to feed each method with."""
    methods = pb.DESCRIPTOR.services_by_name[service].methods
    return {
        each.name: encoded(getattr(pb, each.input_type.name))
        for each in methods
        if each.client_streaming is streams
    }


LIGHTHOUSE_CALLS = inputs("LighthouseService", streams=False)
MANAGER_CALLS = inputs("ManagerService", streams=False)
SESSION = inputs("LighthouseService", streams=True)["Session"]
RENDEZVOUS = inputs("LighthouseService", streams=True)["Rendezvous"]
ATTACH = inputs("ManagerService", streams=True)["Attach"]


@pytest.mark.parametrize("method", LIGHTHOUSE_CALLS)
@MANY
@given(data=st.data())
def test_a_lighthouses_call(lighthouse: Served, method: str, data: st.DataObject) -> None:
    lighthouse.call(method, data.draw(LIGHTHOUSE_CALLS[method]))


@pytest.mark.parametrize("method", MANAGER_CALLS)
@MANY
@given(data=st.data())
def test_a_managers_call(manager: Served, method: str, data: st.DataObject) -> None:
    manager.call(method, data.draw(MANAGER_CALLS[method]))


@MANY
@given(hello=st.booleans(), messages=st.lists(SESSION, max_size=5))
def test_a_session(lighthouse: Served, hello: bool, messages: list[bytes]) -> None:
    first = pb.SessionRequest(hello={"replica_id": "a:1"}).SerializeToString()
    lighthouse.stream("Session", [first, *messages] if hello else messages)


@MANY
@given(hello=st.booleans(), messages=st.lists(RENDEZVOUS, max_size=5))
def test_an_agents_stream(lighthouse: Served, hello: bool, messages: list[bytes]) -> None:
    first = good_agent(f"n{next(_NODES)}").SerializeToString()
    lighthouse.stream("Rendezvous", [first, *messages] if hello else messages)


_NODES = itertools.count()


def good_agent(node_id: str) -> pb.AgentRequest:
    return pb.AgentRequest(
        hello={
            "run_id": "run",
            "node": {"node_id": node_id, "host": "h", "num_workers": 1},
            "settings": {"min_nodes": 1, "max_nodes": 2},
            "state": {"status": pb.AGENT_JOINING, "store_port": 1},
        }
    )


@MANY
@given(raw=encoded(pb.AgentNews))
def test_news_of_a_world_from_another_lighthouse(raw: bytes) -> None:
    try:
        news = world_news_from_wire(pb.AgentNews.FromString(raw))
    except (DecodeError, TorchFTError):
        return
    if isinstance(news, World):
        assert 1 <= len(news.nodes) <= MAX_NODES
        assert news.master_addr.isprintable()
        assert 1 <= news.master_port < 2**16
    elif isinstance(news, RunMove):
        assert news.address.isprintable()
    elif isinstance(news, WorldReached):
        assert 0 <= news.round < 2**53
    elif news is not None and not isinstance(news, AgentWelcome | WarmUp):
        assert news.reason.isprintable()


@MANY
@given(hello=st.booleans(), messages=st.lists(ATTACH, max_size=5))
def test_an_attachment(manager: Served, hello: bool, messages: list[bytes]) -> None:
    first = pb.AttachRequest(hello={"rank": 0, "worker_id": "w"}).SerializeToString()
    manager.stream("Attach", [first, *messages] if hello else messages)


@MANY
@given(raw=encoded(pb.LighthouseQuorumResponse))
@example(raw=b"")
def test_a_quorum_from_another_lighthouse(raw: bytes) -> None:
    try:
        answer = pb.LighthouseQuorumResponse.FromString(raw)
        quorum_from_wire(answer.quorum)
    except (DecodeError, TorchFTError):
        return


@MANY
@given(raw=encoded(pb.ManagerQuorumResponse))
@example(raw=b"")
@example(raw=pb.ManagerQuorumResponse(store_address="s:1", replica_ids=["a"]).SerializeToString())
def test_an_answer_from_another_manager(raw: bytes) -> None:
    try:
        result, _ = quorum_result_from_wire(pb.ManagerQuorumResponse.FromString(raw))
    except (DecodeError, QuorumFailed):
        return
    assert result.store_address
    assert result.replica_ids[result.replica_rank]
    assert len(result.replica_ids) == result.replica_world_size
    for rank in (result.recover_src_replica_rank or 0, *result.recover_dst_replica_ranks):
        assert result.replica_ids[rank]
