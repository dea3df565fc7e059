"""Tests that every describable state comes back equal, and that malformed input is refused."""

from __future__ import annotations

import enum
import json
import math
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchft_svc.client.checkpointing.encoding import serialization, tree
from torchft_svc.client.checkpointing.encoding.memory import Memory
from torchft_svc.client.checkpointing.encoding.serialization import describe, parse
from torchft_svc.client.checkpointing.encoding.tree import map_nodes
from torchft_svc.client.checkpointing.encoding.values import DTYPES
from torchft_svc.errors import CheckpointError, ConfigError

FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def there_and_back(state: object) -> Any:
    described = describe(state)
    plan = parse(described.description, "peer")
    assert plan.size == described.memory.size
    return plan.rebuild(described.memory.copy(0, plan.size), "peer")


def raw(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():  # torch refuses other views of an empty tensor with odd strides
        return b""
    # A clone, because contiguous() leaves any stride as it is where there is but one element.
    dense = tensor.clone(memory_format=torch.contiguous_format)
    return dense.flatten().view(torch.uint8).numpy().tobytes()


def same(left: object, right: object) -> bool:
    """Equal in type and value, NaN included, tensors bit by bit."""
    if isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor)
        return (left.dtype, left.shape) == (right.dtype, right.shape) and raw(left) == raw(right)
    if type(left) is not type(right):
        return False
    if is_dataclass(left):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in fields(left))
    if isinstance(left, set | frozenset):
        return left == right
    if isinstance(left, defaultdict | deque) and isinstance(right, type(left)):
        extra = "maxlen" if isinstance(left, deque) else "default_factory"
        if getattr(left, extra) != getattr(right, extra):
            return False
    if isinstance(left, dict):
        assert isinstance(right, dict)
        return len(left) == len(right) and all(
            same(a, b) and same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, list | tuple | deque):
        assert isinstance(right, list | tuple | deque)
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right)


def tensors() -> st.SearchStrategy[torch.Tensor]:
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
    shapes = st.lists(st.integers(0, 5), max_size=3)

    def make(shape: list[int], dtype: torch.dtype, change: str) -> torch.Tensor:
        tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
        if change == "transposed" and tensor.dim() > 1:
            return tensor.transpose(0, 1)
        if change == "with gaps" and tensor.dim() > 0:
            return tensor[::2]
        if change == "expanded":
            return tensor.unsqueeze(0).expand(3, *shape)
        return tensor

    changes = st.sampled_from(["", "transposed", "with gaps", "expanded"])
    return st.builds(make, shapes, st.sampled_from(dtypes), changes)


floats = st.floats() | st.sampled_from([0.1, -0.0, math.nan, math.inf, -math.inf])
plain = st.none() | st.booleans() | st.integers() | floats | st.text(max_size=5)
keys = st.recursive(plain, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=3)
leaves = (
    plain
    | st.binary(max_size=5)
    | st.complex_numbers()
    | st.sampled_from(list(DTYPES.values()))
    | st.lists(st.integers(0, 9), max_size=3).map(torch.Size)
    | tensors()
)
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


@FEW
@given(states)
def test_any_state_comes_back_equal(state: object) -> None:
    assert same(state, there_and_back(state))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_tensors_of_every_dtype_come_back(name: str) -> None:
    tensor = torch.empty(7, dtype=DTYPES[name])
    if tensor.is_quantized:
        with pytest.raises(ConfigError, match="quantized"):
            describe(tensor)
        return
    received = there_and_back(tensor)
    assert received.dtype == tensor.dtype
    assert bytes(received.untyped_storage()) == bytes(tensor.untyped_storage())


def test_what_numpy_and_the_standard_library_leave_in_a_state_comes_back() -> None:
    model = torch.nn.Linear(1, 1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD(model.parameters()), [3, 3, 9])
    milestones = there_and_back(scheduler.state_dict())["milestones"]
    assert type(milestones) is Counter
    assert milestones == Counter({3: 2, 9: 1})
    kind, words, *rest = there_and_back(np.random.RandomState(7).get_state())
    assert (kind, *rest) == ("MT19937", 624, 0, 0.0)
    assert isinstance(words, np.ndarray)
    assert words.tobytes() == np.random.RandomState(7).get_state()[1].tobytes()  # type: ignore[union-attr]
    words[0] = 1  # its own memory
    scalars = [np.int64(-3), np.float32(0.5), np.bool_(True), np.str_("x")]
    received = there_and_back(scalars)
    assert received == scalars
    assert [type(value) for value in received] == [type(value) for value in scalars]


class Color(enum.Enum):
    RED = 1
    GREEN = "x"


class Level(enum.IntEnum):
    LOW = 3


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: Any = None


@dataclass(frozen=True)
class Record:
    step: int
    value: Any
    notes: list[str] = field(default_factory=list, init=False)


@dataclass(slots=True)
class Narrow:
    value: Any

    def __post_init__(self) -> None:
        self.value = [*self.value, 0]  # a constructor that runs again would show


@dataclass
class Grown:
    step: int

    def __post_init__(self) -> None:
        self.more = 1


def local_type() -> Any:
    @dataclass
    class Local:
        step: int

    return Local


Local = local_type()


class Textual(str):
    """A subclass of str."""


def named(model: Any) -> OrderedDict[str, Any]:
    state: OrderedDict[str, Any] = OrderedDict(a=1)
    state.model = model  # type: ignore[attr-defined]
    return state


KNOWN: list[Any] = [
    {1, "x", None, (2, 3.5), b"y", Color.RED, Point(1, "a"), frozenset({4})},
    frozenset({Path("/a/b"), torch.float32}),
    deque([1, torch.ones(2), 3], maxlen=5),
    deque(),
    OrderedDict(b=1, a=deque([OrderedDict(x=2)])),
    defaultdict(list, {1: [2]}),
    defaultdict(None, x=defaultdict(int, y=1)),
    {"milestones": Counter({5: 1, 3: 2}), "others": Counter(a=0.5, b=-1, c=torch.ones(1))},
    [Color.RED, Color.GREEN, Level.LOW, Access.READ | Access.WRITE, Access(0)],
    Point(1, [Point(2, torch.arange(3))]),
    Record(3, {"a": Narrow([torch.ones(2), Color.RED])}),
    [bytearray(b"xyz"), b"", Path("a") / "b", PurePosixPath("/x"), PureWindowsPath("c:\\x")],
    [datetime(2026, 1, 2, 3, 4, 5, 6), datetime(2026, 10, 25, 2, tzinfo=ZoneInfo("UTC"), fold=1)],
    [datetime.now(timezone.utc), timezone(timedelta(hours=2)), timezone(timedelta(0), "here")],
    [date(2026, 1, 2), time(1, 2, 3, 4, timezone.utc), timedelta(-1, 2, 3)],
    [Decimal("1.10"), Fraction(-1, 3), UUID(int=7), range(9, 1, -2)],
    [complex(1, -0.0), torch.device("cpu"), torch.device("cuda:3"), torch.bfloat16, torch.strided],
    [torch.Size([2, 3]), torch.channels_last],
    [np.float16(0.1), np.float32(0.1), np.float64(0.1), np.longdouble(0.1), np.complex64(1j)],
    [np.uint64(2**64 - 1), np.int8(-1), np.bool_(False), np.str_(""), np.bytes_(b"ab")],
    [np.datetime64("2026-01-01"), np.timedelta64(3, "ms"), np.datetime64("NaT", "D")],
    {(1, frozenset({2})): 1, Color.RED: 2, b"k": 3, Point(1): 4, date(2026, 1, 1): 5},
]


@pytest.mark.parametrize("number", range(len(KNOWN)))
def test_known_types_come_back_as_they_were(number: int) -> None:
    assert same(KNOWN[number], there_and_back(KNOWN[number]))


@pytest.mark.parametrize("number", range(len(KNOWN)))
def test_a_mapped_state_has_the_same_values_in_containers_of_its_own(number: int) -> None:
    state = KNOWN[number]
    mapped = map_nodes(state, lambda value: value)
    assert same(mapped, state)
    if isinstance(state, dict | list | deque):
        assert mapped is not state


@FEW
@given(states)
def test_any_state_is_mapped_to_an_equal_one(state: object) -> None:
    assert same(map_nodes(state, lambda value: value), state)


def test_each_container_of_tensors_is_entered() -> None:
    one = torch.ones(1)
    layers: OrderedDict[str, Any] = OrderedDict(weight=one)
    layers._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    state = {
        "counter": Counter(a=one),
        "defaults": defaultdict(list, a=[one]),
        "queue": deque([one, one], maxlen=2),
        "model": layers,
        "point": Point(1, (one,)),
        "record": Record(1, {"a": one}),
        "narrow": [Narrow([one])],
    }
    mapped = map_nodes(state, lambda value: 2.0 if isinstance(value, torch.Tensor) else value)
    narrow = Narrow([2.0])
    narrow.value = [2.0, 0]
    expected = {
        "counter": Counter(a=2.0),
        "defaults": defaultdict(list, a=[2.0]),
        "queue": deque([2.0, 2.0], maxlen=2),
        "model": OrderedDict(weight=2.0),
        "point": Point(1, (2.0,)),
        "record": Record(1, {"a": 2.0}),
        "narrow": [narrow],
    }
    assert same(mapped, expected)
    assert mapped["model"]._metadata == {"": {"version": 2}}
    assert layers["weight"] is one, "the state itself is as it was"


class Options(dict[str, Any]):
    """A dict with a constructor of its own."""

    def __init__(self, owner: str, **options: Any) -> None:
        super().__init__(**options)
        self.owner = owner


class Steps(list[int]):
    """A list with a constructor of its own."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__(range(first, last))


class Marked(Point):
    """A namedtuple with an attribute beside its fields."""

    note = ""


class Corner(Point, enum.Enum):
    TOP = (0, 1)


def test_what_cannot_be_sent_is_mapped_as_one_node() -> None:
    """The whole object reaches the check that refuses it."""
    marked = Marked(1, 2)
    marked.note = "here"
    state = [
        Options("me", a=1),
        Steps(1, 4),
        marked,
        Grown(1),
        ChainMap({"a": 1}, {"b": 2}),
        UserDict(a=1),
        UserList([1]),
        MappingProxyType({"a": 1}),
        SimpleNamespace(a=1),
    ]
    mapped = map_nodes(state, lambda value: value)
    for each, was in zip(mapped, state, strict=True):
        assert each is was
        with pytest.raises(ConfigError, match=r"state_dict\[0\]"):
            describe([each])
    assert map_nodes(Corner.TOP, lambda value: value) is Corner.TOP
    assert there_and_back(Corner.TOP) is Corner.TOP


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.array([["x", "yz"]]),
        np.array([b"abc", b""]),
        np.array(["2026-01-01", "NaT"], dtype="datetime64[s]"),
        np.array(3.5),
        np.empty((0, 4)),
        np.empty((2, 0), dtype="U3"),
        np.arange(3, dtype=np.longdouble),
        np.arange(3, dtype=np.uint64),
    ],
    ids=lambda array: array.dtype.str,
)
def test_numpy_arrays_come_back(array: np.ndarray[Any, Any]) -> None:
    received = there_and_back({"a": array, "b": array + array if array.dtype.kind == "f" else 1})
    assert (received["a"].dtype, received["a"].shape) == (array.dtype, array.shape)
    assert received["a"].tobytes() == array.tobytes()


def test_what_torch_notes_beside_a_state_comes_back() -> None:
    state = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1)).state_dict()
    received = there_and_back({"model": state})["model"]
    assert received._metadata == state._metadata  # type: ignore[attr-defined]
    assert received._metadata["1"] == {"version": 2}


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (["dataclass", "nowhere:Record", "step", 1], "no dataclass 'nowhere:Record': define or"),
        (["dataclass", f"{__name__}:Point", "x", 1], "no dataclass"),
        (["dataclass", f"{__name__}:Record", "step", 1], "has the fields .*'value'.*not"),
        (["dataclass", "os:path.join"], "no dataclass"),
        (["namedtuple", f"{__name__}:Point", 1], "Point has 2 fields here, not 1"),
        (["namedtuple", "builtins:tuple", 1], "no namedtuple"),
        (["enum", f"{__name__}:Color", "BLUE"], "Color has no member 'BLUE' here"),
        (["enum", f"{__name__}:Color", []], "malformed"),
        (["enum", "builtins:object", "x"], "no enum"),
        (["flag", f"{__name__}:Access", "x"], "malformed"),
        (["defaultdict", "eval"], "malformed"),
        (["defaultdict", []], "malformed"),
        (["deque", 1, 2, 3], "longer than it may be"),
        (["deque", "x"], "longer"),
        (["set", ["l"]], "list is no key"),
        (["set", ["T", 0]], "not in the table"),
        (["metadata", 1, ["d"]], "something else than an OrderedDict"),
        (["scalar", "|O8", "AAAA"], "dtype that is not sent"),
        (["array", "<f8", [9], ["T", 0]], "malformed"),
        (["scalar", "<f8", "AAAA"], "another size"),
        (["scalar", "<f8"], "malformed"),
        (["zone", "../../etc/passwd"], "malformed"),
        (["uuid", 3], "malformed"),
        (["datetime", "never", 0, None], "malformed"),
        (["device", "toaster"], "malformed"),
        (["range", "0x0", "0x1", "0x0"], "malformed"),
    ],
)
def test_hostile_values_of_known_types_are_refused(node: Any, message: str) -> None:
    plan = parse(document(tree=node), "peer")
    with pytest.raises(CheckpointError, match=message):
        plan.rebuild(memoryview(bytearray(plan.size)), "peer")


def test_tied_tensors_travel_once_and_are_tied_again() -> None:
    weight = torch.arange(60_000.0).reshape(200, 300)
    described = describe({"a": weight, "b": weight, "t": weight.t(), "row": weight[3]})
    assert described.memory.size == weight.nbytes
    received = there_and_back({"a": weight, "t": weight.t(), "row": weight[3]})
    received["a"][3, 5] = -1.0
    assert received["t"][5, 3] == received["row"][5] == -1.0


def test_views_of_one_buffer_do_not_bring_the_whole_buffer() -> None:
    flat = torch.arange(1_000_000.0)
    state = {"first": flat[:10], "last": flat[-10:]}
    assert describe(state).memory.size == 128
    assert same(state, there_and_back(state))


def test_views_of_different_dtypes_share_bytes() -> None:
    numbers = torch.arange(12, dtype=torch.float32)
    state = {"bytes": numbers.view(torch.uint8)[3:40], "pairs": numbers[2:8].view(torch.complex64)}
    assert same(state, there_and_back(state))


def test_parameters_come_back_as_plain_tensors() -> None:
    received = there_and_back(torch.nn.Parameter(torch.ones(3)))
    assert type(received) is torch.Tensor
    assert not received.requires_grad


def test_memory_of_large_tensors_is_not_copied_when_described() -> None:
    weight = torch.zeros(100_000)
    described = describe([weight])
    weight += 1
    assert bytes(described.memory.copy(0, 4)) == raw(torch.ones(1))


def test_receiving_does_not_touch_the_sender() -> None:
    weight = torch.zeros(100_000)
    there_and_back(weight).fill_(1)
    assert not weight.any()


class Odd:
    def __reduce__(self) -> Any:
        raise AssertionError("somebody pickles")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"optim": {"fn": len}}, r"state_dict\['optim'\]\['fn'\].*builtin_function_or_method"),
        ([1, (2, Odd())], r"state_dict\[1\]\[1\].*Odd objects cannot be sent"),
        ({Odd: 1}, r"state_dict.*the key .* cannot be sent"),
        ({"a": {1, Odd()}}, r"state_dict\['a'\].*the key .* cannot be sent: Odd objects"),
        ({"a": np.array([Odd()])}, r"state_dict\['a'\].*dtype object cannot be sent"),
        ({"a": np.ma.masked_array([1], [True])}, r"state_dict\['a'\].*MaskedArray arrays"),
        ([defaultdict(Odd)], r"state_dict\[0\].*its default_factory is .*; use one of Counter"),
        ([Local(1)], r"state_dict\[0\].*Local has to be defined at the top of a module"),
        ([Grown(1)], r"state_dict\[0\].*attributes beside its fields: more"),
        ([Record(1, Odd())], r"state_dict\[0\]\.value.*Odd objects"),
        ([named(torch.nn.Module())], r"state_dict\[0\].*attributes of its own: model"),
        ([Textual("x")], r"state_dict\[0\].*Textual objects"),
        ([torch.ones(2).to_sparse()], r"state_dict\[0\].*only dense tensors"),
        ([torch.ones(2, device="meta")], r"state_dict\[0\].*no data"),
    ],
)
def test_what_cannot_be_sent_is_named_with_its_path(state: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe(state)


def test_a_list_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ConfigError, match="nested more than 64 levels"):
        describe(endless)


def document(**changes: Any) -> bytes:
    """A good description of one tensor of 4 floats, with changes."""
    good: dict[str, Any] = json.loads(describe(torch.ones(4)).description)
    return json.dumps(good | changes).encode()


def tensor_entry(**changes: Any) -> bytes:
    entry = {"blob": 0, "dtype": "float32", "shape": [4], "strides": [1], "offset": 0} | changes
    return document(tensors=[list(entry.values())])


def deep(levels: int) -> bytes:
    head, tail = document(tree="?").split(b'"?"')
    return head + b'["l",' * levels + b"1" + b"]" * levels + tail


HOSTILE = {
    "no JSON": b"\x80\x04}",
    "not UTF-8": b'"\xff"',
    "a list": b"[]",
    "another version": document(version=2),
    "no table": document(tensors=None),
    "a negative size": document(blobs=[-16]),
    "a size of another type": document(blobs=[True]),
    "a size out of this world": document(blobs=[1 << 60]),
    "more than can be": document(blobs=[1 << 44, 1 << 44]),
    "NaN": document(tree=math.nan),
    "an entry too short": document(tensors=[[0]]),
    "an unknown dtype": tensor_entry(dtype="float31"),
    "a dtype that is none": tensor_entry(dtype=["float32"]),
    "a negative dimension": tensor_entry(shape=[-4]),
    "a huge dimension": tensor_entry(shape=[1 << 62]),
    "too many dimensions": tensor_entry(shape=[1] * 65, strides=[1] * 65),
    "no strides": tensor_entry(strides=[]),
    "negative strides": tensor_entry(strides=[-1]),
    "a view beyond its blob": tensor_entry(offset=4),
    "a crooked offset": tensor_entry(offset=2, shape=[1]),
    "strides beyond the blob": tensor_entry(strides=[2]),
    "more elements than bytes": tensor_entry(shape=[1 << 40], strides=[0]),
    "another blob": tensor_entry(blob=1),
    "a negative blob": tensor_entry(blob=-1),
}
HOSTILE_TREES: dict[str, Any] = {
    "an object": {"a": 1},
    "an empty node": [],
    "a node without a tag": [1, 2],
    "an unknown tag": ["eval", "1"],
    "a tensor that is missing": ["T", 1],
    "a tensor by a negative number": ["T", -1],
    "a key without a value": ["d", "a"],
    "a list as a key": ["d", ["l"], 1],
    "bad base64": ["b", "*"],
    "a bad integer": ["i", "zz"],
    "a bad float": ["f", "pi"],
    "an unknown dtype": ["y", "cuda"],
    "a bad complex": ["c", 1.0, "x"],
    "a negative torch.Size": ["z", -1],
    "a text in a torch.Size": ["z", "1"],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_description_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="checkpoint from peer: malformed description"):
        parse(HOSTILE[name], "peer")


@pytest.mark.parametrize("name", HOSTILE_TREES)
def test_a_hostile_tree_is_refused(name: str) -> None:
    plan = parse(document(tree=HOSTILE_TREES[name]), "peer")
    with pytest.raises(CheckpointError, match="checkpoint from peer: malformed description"):
        plan.rebuild(memoryview(bytearray(plan.size)), "peer")


@pytest.mark.parametrize("levels", [tree.MAX_DEPTH + 2, 5_000, 200_000])
def test_a_depth_bomb_is_refused(levels: int) -> None:
    with pytest.raises(CheckpointError, match="nested"):
        parse(deep(levels), "peer").rebuild(memoryview(bytearray(64)), "peer")


@FEW
@given(st.data())
def test_a_damaged_description_is_refused_or_harmless(data: st.DataObject) -> None:
    good = bytearray(describe({"w": torch.ones(4), "n": [1, None, 2.5]}).description)
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        plan = parse(good, "peer")
        if plan.size < 1 << 20:
            plan.rebuild(memoryview(bytearray(plan.size)), "peer")
    except CheckpointError:
        pass


def test_too_many_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization, "MAX_DESCRIPTION_BYTES", 1000)
    with pytest.raises(ConfigError, match="its description takes more than"):
        describe([torch.ones(1) for _ in range(100)])


def test_what_was_copied_from_the_owner_is_not_copied_again() -> None:
    live, own = torch.arange(100, dtype=torch.uint8), torch.arange(100, 150, dtype=torch.uint8)
    pieces = [(0, memoryview(live.numpy())), (100, memoryview(own.numpy()))]
    memory = Memory(pieces, 150, steady=[100])
    kept = [memory.keep(10, 20), memory.keep(90, 110), memory.keep(110, 120)]
    live.zero_()
    own.zero_()
    assert [bytes(each) for each in kept] == [
        bytes(range(10, 20)),
        bytes(range(90, 110)),
        bytes(10),  # the same memory, of which its owner has promised that nobody writes to it
    ]
