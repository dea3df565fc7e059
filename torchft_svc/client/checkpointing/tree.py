"""Writes a state's nesting as JSON and reads it back; tensors are left to a table of their own.

null, booleans, strings, finite floats and small integers stand for themselves. Everything else is
an array that begins with a tag:

    ["d", key, value, ...]  dict        ["o", ...]  OrderedDict     ["l", ...]  list
    ["t", ...]  tuple                   ["z", ...]  torch.Size      ["T", n]    tensor n
    ["i", "0x.."]  large integer        ["f", "nan"]  float         ["c", re, im]  complex
    ["b", base64]  bytes                ["y", "float32"]  torch.dtype
    ["C", key, count, ...]  Counter     ["n", n]  numpy array, sent as tensor n

and the rest by its name: ``set``, ``frozenset``, ``deque``, ``defaultdict``, ``metadata`` (an
OrderedDict with torch's ``_metadata``), ``array`` and ``scalar`` (numpy), ``datetime`` and the
like, ``namedtuple``, ``dataclass``, ``enum``, ``flag``.

The last four name a type of the program as ``module:name``. The receiver looks it up among what it
has defined or imported; nothing is imported, and no constructor is called.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import json
import math
import pathlib
import re
import sys
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from torchft_svc.errors import ConfigError

# Deeper nesting is a mistake (a list that holds itself) or an attack on the reader's stack.
MAX_DEPTH = 64
# Beyond 64 bits integers are written in hexadecimal, which has no limit on the number of digits.
_SMALL_INT = 1 << 63

Json = Any
TakeTensor = Callable[[torch.Tensor, str], int]

# Tensor dtypes that this build of torch has, by the name that is sent.
DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_LAYOUTS: dict[str, Any] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.layout | torch.memory_format)
}


class BadTree(ValueError):
    """A description that no sender of ours writes; the text says where it goes wrong."""


def encode(
    value: object, take_tensor: TakeTensor, path: str = "state_dict", depth: int = 0
) -> Json:
    """``value`` as JSON; each tensor is handed to ``take_tensor`` with its path for a number.

    Raises:
        ConfigError: a value that cannot be sent; its field is the path in the tree.
    """
    if isinstance(value, torch.Tensor):
        return ["T", take_tensor(value, path)]
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind in _SCALARS:
        tag, write_plain, _ = _SCALARS[kind]
        plain = write_plain(value)
        return [tag, *plain] if isinstance(plain, list) else plain
    if depth >= MAX_DEPTH:
        raise _refused(value, path[:200], f"it is nested more than {MAX_DEPTH} levels deep")
    write = _WRITERS.get(kind)
    if write is not None:
        return write(value, take_tensor, path, depth)
    if isinstance(value, np.generic | np.ndarray):
        return _encode_numpy(value, take_tensor, path)
    return _encode_typed(value, take_tensor, path, depth)


def decode(node: Json, tensors: Sequence[torch.Tensor], depth: int = 0) -> Any:
    """The value that ``encode`` wrote as ``node``, with ``tensors`` put in their places.

    Raises:
        BadTree: ``node`` is not what ``encode`` writes, or a type in it is not one of this program.
    """
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if not isinstance(node, list) or not node or not isinstance(node[0], str):
        raise BadTree("a node is neither a plain value nor a tagged array")
    if depth > MAX_DEPTH:
        raise BadTree(f"nested more than {MAX_DEPTH} levels deep")
    tag, items = node[0], node[1:]
    if tag == "T":
        return tensors[_index(items, len(tensors))]
    try:
        if tag in _READERS:
            return _READERS[tag](items, tensors, depth)
        if tag in _SCALAR_TAGS:
            return _SCALAR_TAGS[tag](*items)
    except BadTree:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise BadTree(f"a value of kind {tag[:20]!r} cannot be read") from error
    raise BadTree(f"unknown kind {tag[:20]!r}")


def map_nodes(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with ``change`` made to every node, from the top; what is changed is not entered.

    Containers are copied, leaves are not; what is not known here stays as it is.
    """
    changed = change(value)
    if changed is not value:
        return changed
    kind = type(value)
    if kind in _DICTS:
        result = defaultdict(value.default_factory) if kind is defaultdict else kind()
        result.update((key, map_nodes(item, change)) for key, item in value.items())
        if kind is OrderedDict:
            vars(result).update(vars(value))
        return result
    if kind in (list, tuple):
        return kind(map_nodes(item, change) for item in value)
    if kind is deque:
        return deque((map_nodes(item, change) for item in value), value.maxlen)
    if _is_namedtuple(kind):
        return tuple.__new__(kind, [map_nodes(item, change) for item in value])
    if dataclasses.is_dataclass(kind) and not _why_not_dataclass(value):
        names = [field.name for field in dataclasses.fields(kind)]
        return _build(kind, {name: map_nodes(getattr(value, name), change) for name in names})
    return value


def tensor_places(node: Json) -> list[tuple[tuple[str, ...], int]]:
    """Where in an encoded tree there are tensors, and their numbers."""
    if not isinstance(node, list) or not node:
        return []
    tag, items = node[0], node[1:]
    if tag in ("T", "n"):
        return [((), _index(items, _SMALL_INT))]
    steps: list[str] = [f"{tag}{place}" for place in range(len(items))]
    if tag in _KEYED:
        first = _KEYED[tag]
        steps[first + 1 :: 2] = map(json.dumps, items[first::2])
    return [
        ((step, *path), number)
        for step, item in zip(steps, items, strict=True)
        for path, number in tensor_places(item)
    ]


# -- plain values --------------------------------------------------------------------------------


def _float(value: float) -> Json:
    return value if math.isfinite(value) else ["f", repr(value)]


def _base64(value: bytes | bytearray) -> list[Json]:
    return [base64.b64encode(value).decode("ascii")]


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _complex(real: Json, imag: Json) -> complex:
    parts = [decode(part, (), MAX_DEPTH) for part in (real, imag)]
    if not all(isinstance(part, float) for part in parts):
        raise BadTree("a complex number is not made of two floats")
    return complex(*parts)


def _name(value: Any) -> list[Json]:
    return [str(value).removeprefix("torch.")]


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise BadTree(f"this build of torch has no dtype {name[:40]!r}")
    return DTYPES[name]


def _timezone(days: int, seconds: int, microseconds: int, name: str | None) -> dt.timezone:
    offset = dt.timedelta(days, seconds, microseconds)
    return dt.timezone(offset) if name is None else dt.timezone(offset, name)


def _write_timezone(value: dt.timezone) -> list[Json]:
    offset = value.utcoffset(None)
    name = value.tzname(None)
    return [*_write_timedelta(offset), None if repr(value) == repr(dt.timezone(offset)) else name]


def _write_timedelta(value: dt.timedelta) -> list[Json]:
    return [value.days, value.seconds, value.microseconds]


def _write_zone(value: zoneinfo.ZoneInfo) -> list[Json]:
    return [value.key]


def _hexes(*values: int) -> list[Json]:
    return [hex(value) for value in values]


def _from_hex(kind: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *texts: kind(*(int(text, 16) for text in texts))


_Scalar = tuple[str, Callable[[Any], Json], Callable[..., Any]]
# By type: its tag, how it is written (plain, or as a list of plain values) and how it is read.
_SCALARS: dict[type, _Scalar] = {
    int: ("i", lambda v: v if abs(v) < _SMALL_INT else _hexes(v), _from_hex(int)),
    float: ("f", lambda v: v if math.isfinite(v) else [repr(v)], lambda text: float(text)),
    complex: ("c", lambda v: [_float(v.real), _float(v.imag)], _complex),
    bytes: ("b", _base64, _bytes),
    bytearray: ("bytearray", _base64, lambda text: bytearray(_bytes(text))),
    range: ("range", lambda v: _hexes(v.start, v.stop, v.step), _from_hex(range)),
    torch.dtype: ("y", _name, _dtype),
    torch.layout: ("layout", _name, _LAYOUTS.__getitem__),
    torch.memory_format: ("memory_format", _name, _LAYOUTS.__getitem__),
    torch.device: ("device", _name, torch.device),
    decimal.Decimal: ("decimal", _name, decimal.Decimal),
    fractions.Fraction: (
        "fraction",
        lambda v: _hexes(v.numerator, v.denominator),
        _from_hex(fractions.Fraction),
    ),
    uuid.UUID: ("uuid", _name, lambda text: uuid.UUID(text)),
    dt.date: ("date", _name, dt.date.fromisoformat),
    dt.timedelta: ("timedelta", _write_timedelta, dt.timedelta),
    dt.timezone: ("timezone", _write_timezone, _timezone),
    zoneinfo.ZoneInfo: ("zone", _write_zone, zoneinfo.ZoneInfo),
    type(pathlib.Path()): ("path", _name, pathlib.Path),
    pathlib.PurePosixPath: ("posix_path", _name, pathlib.PurePosixPath),
    pathlib.PureWindowsPath: ("windows_path", _name, pathlib.PureWindowsPath),
}
_SCALAR_TAGS = {tag: read for tag, _, read in _SCALARS.values()}


# -- numpy ---------------------------------------------------------------------------------------

# Booleans, numbers, text and times; no objects, and no records.
_NUMPY_KINDS = "biufcSUmM"
_NUMPY_TYPE = re.compile(rf"[<>|=][{_NUMPY_KINDS}]\d{{1,9}}(\[\d{{0,9}}[A-Za-z]{{1,7}}\])?")


def _encode_numpy(value: np.generic | np.ndarray[Any, Any], take: TakeTensor, path: str) -> Json:
    dtype = value.dtype
    if dtype.kind not in _NUMPY_KINDS:
        raise _refused(value, path, f"numpy values of dtype {dtype} cannot be sent")
    if isinstance(value, np.generic):
        return [
            "scalar",
            dtype.str,
            *_base64(value.tobytes()[: dtype.itemsize]),
        ]  # an empty text has some
    if type(value) is not np.ndarray:
        raise _refused(value, path, f"{type(value).__name__} arrays cannot be sent")
    try:
        return ["n", take(torch.from_numpy(value.copy()), path)]
    except (TypeError, ValueError):  # not a dtype, or not an order of bytes, that torch has
        raw = torch.frombuffer(bytearray(value.tobytes() or b"\0"), dtype=torch.uint8)
        return ["array", dtype.str, list(value.shape), ["T", take(raw, path)]]


def _numpy_type(text: Json) -> np.dtype[Any]:
    if not isinstance(text, str) or not _NUMPY_TYPE.fullmatch(text):
        raise BadTree("a numpy value has a dtype that is not sent")
    return np.dtype(text)


def _read_array(items: list[Json], tensors: Sequence[torch.Tensor], depth: int) -> Any:
    text, shape, node = items
    raw = decode(node, tensors, depth + 1)
    if not isinstance(raw, torch.Tensor) or raw.dtype != torch.uint8:
        raise BadTree("an array is not made of bytes")
    dtype, count = _numpy_type(text), math.prod(_sizes(shape))
    data = raw.cpu().numpy().tobytes()
    if count * dtype.itemsize > len(data):
        raise BadTree("an array reaches outside of its bytes")
    return np.ndarray(shape, dtype, data[: count * dtype.itemsize] or b"\0").copy()


def _read_scalar(items: list[Json], tensors: Sequence[torch.Tensor], depth: int) -> Any:
    text, encoded = items
    dtype, data = _numpy_type(text), _bytes(encoded)
    if len(data) != dtype.itemsize:
        raise BadTree("a numpy value has another size than its dtype")
    return np.ndarray((), dtype, data or b"\0")[()]


# -- containers ----------------------------------------------------------------------------------

_SEQUENCES: dict[type, str] = {list: "l", tuple: "t", torch.Size: "z"}
# A Counter is what torch's MultiStepLR keeps its milestones in.
_DICTS: dict[type, str] = {dict: "d", OrderedDict: "o", Counter: "C", defaultdict: "defaultdict"}
# What holds pairs of a key and a value, and where these begin: behind a factory, or a type.
_KEYED = {"d": 0, "o": 0, "C": 0, "defaultdict": 1, "dataclass": 1}
# What a defaultdict may make its values with: nothing that a program could have written itself.
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (bool, bytes, dict, float, int, list, set, str, tuple, deque, Counter, OrderedDict)
}


def _encode_items(items: Iterable[Any], take: TakeTensor, path: str, depth: int) -> list[Json]:
    return [encode(item, take, f"{path}[{i}]", depth + 1) for i, item in enumerate(items)]


def _encode_sequence(value: Any, take: TakeTensor, path: str, depth: int) -> Json:
    return [_SEQUENCES[type(value)], *_encode_items(value, take, path, depth)]


def _encode_deque(value: deque[Any], take: TakeTensor, path: str, depth: int) -> Json:
    return ["deque", value.maxlen, *_encode_items(value, take, path, depth)]


def _encode_set(value: Any, take: TakeTensor, path: str, depth: int) -> Json:
    """In one order on all hosts: descriptions are compared between the sources of one state."""
    keys = [_encode_key(item, path, depth) for item in value]
    return [type(value).__name__, *sorted(keys, key=json.dumps)]


def _encode_clock(value: dt.datetime | dt.time, take: TakeTensor, path: str, depth: int) -> Json:
    zone = encode(value.tzinfo, take, f"{path}.tzinfo", depth + 1)
    text = value.replace(tzinfo=None, fold=0).isoformat()
    return [type(value).__name__, text, value.fold, zone]


def _encode_dict(value: dict[Any, Any], take: TakeTensor, path: str, depth: int) -> Json:
    node: list[Json] = [_DICTS[type(value)]]
    if isinstance(value, defaultdict):
        factory: Any = value.default_factory
        name = getattr(factory, "__name__", "")
        if factory is not None and _FACTORIES.get(name) is not factory:
            known = ", ".join(sorted(_FACTORIES))
            raise _refused(value, path, f"its default_factory is {factory!r}; use one of {known}")
        node.append(None if factory is None else name)
    for key, item in value.items():
        node.append(_encode_key(key, path, depth))
        node.append(encode(item, take, f"{path}[{key!r}]", depth + 1))
    attributes = vars(value) if isinstance(value, OrderedDict) else {}
    if attributes.keys() - {"_metadata"}:
        raise _refused(value, path, f"it has attributes of its own: {', '.join(attributes)}")
    if attributes:
        metadata = encode(attributes["_metadata"], take, f"{path}._metadata", depth + 1)
        return ["metadata", metadata, node]
    return node


def _encode_key(key: object, path: str, depth: int) -> Json:
    if type(key) is str:
        return key
    try:
        return encode(key, _take_no_tensor, path, depth + 1)
    except ConfigError as error:
        reason = f"the key {str(key)[:40]!r} cannot be sent: {error.reason}"
        raise _refused(key, path, reason) from error


def _take_no_tensor(tensor: torch.Tensor, path: str) -> int:
    raise _refused(tensor, path, "a tensor is no key")


def _fill(result: Any, items: list[Json], tensors: Sequence[torch.Tensor], depth: int) -> Any:
    if len(items) % 2:
        raise BadTree("a dict has a key without a value")
    for key_node, item in zip(items[::2], items[1::2], strict=True):
        key = _hashable(decode(key_node, (), depth + 1))
        result[key] = decode(item, tensors, depth + 1)
    return result


def _hashable(key: Any) -> Any:
    try:
        hash(key)
    except TypeError as error:
        raise BadTree(f"a {type(key).__name__} is no key of a dict, nor in a set") from error
    return key


def _read_dict(kind: Callable[[], Any]) -> Callable[..., Any]:
    return lambda items, tensors, depth: _fill(kind(), items, tensors, depth)


def _read_sequence(kind: Callable[[Iterable[Any]], Any]) -> Callable[..., Any]:
    return lambda items, tensors, depth: kind(decode(i, tensors, depth + 1) for i in items)


def _read_defaultdict(items: list[Json], tensors: Sequence[torch.Tensor], depth: int) -> Any:
    name, *rest = items
    factory = None if name is None else _FACTORIES[name]
    return _fill(defaultdict(factory), rest, tensors, depth)


def _read_metadata(items: list[Json], tensors: Sequence[torch.Tensor], depth: int) -> Any:
    metadata, node = (decode(item, tensors, depth + 1) for item in items)
    if type(node) is not OrderedDict:
        raise BadTree("metadata belongs to something else than an OrderedDict")
    node._metadata = metadata  # type: ignore[attr-defined]
    return node


def _read_deque(items: list[Json], tensors: Sequence[torch.Tensor], depth: int) -> Any:
    maxlen, *rest = items
    if maxlen is not None and not (type(maxlen) is int and len(rest) <= maxlen):
        raise BadTree("a deque is longer than it may be")
    return deque((decode(item, tensors, depth + 1) for item in rest), maxlen)


def _read_set(kind: Callable[[Iterable[Any]], Any]) -> Callable[..., Any]:
    def read(items: list[Json], tensors: Sequence[torch.Tensor], depth: int) -> Any:
        return kind([_hashable(decode(item, (), depth + 1)) for item in items])

    return read


def _read_clock(kind: Any) -> Callable[..., Any]:
    def read(items: list[Json], tensors: Sequence[torch.Tensor], depth: int) -> Any:
        text, fold, zone = items
        return kind.fromisoformat(text).replace(fold=fold, tzinfo=decode(zone, (), depth + 1))

    return read


_WRITERS: dict[type, Callable[[Any, TakeTensor, str, int], Json]] = {
    **dict.fromkeys(_SEQUENCES, _encode_sequence),
    **dict.fromkeys(_DICTS, _encode_dict),
    deque: _encode_deque,
    set: _encode_set,
    frozenset: _encode_set,
    dt.datetime: _encode_clock,
    dt.time: _encode_clock,
}


# -- types of the program ------------------------------------------------------------------------


def _encode_typed(value: Any, take: TakeTensor, path: str, depth: int) -> Json:
    kind = type(value)
    is_enum, is_dataclass = isinstance(value, enum.Enum), dataclasses.is_dataclass(kind)
    if not (is_enum or is_dataclass or _is_namedtuple(kind)):
        raise _refused(value, path, f"{kind.__name__} objects cannot be sent")
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _find_type(name) is not kind:
        reason = f"the type {kind.__qualname__} has to be defined at the top of a module, by name"
        raise _refused(value, path, reason)
    if isinstance(value, enum.Flag):
        return ["flag", name, encode(value.value, take, path, depth + 1)]
    if is_enum:
        return ["enum", name, value.name]
    reason = _why_not_dataclass(value) if is_dataclass else _beside(value, ())
    if reason:
        raise _refused(value, path, reason)
    if not is_dataclass:
        return ["namedtuple", name, *_encode_items(value, take, path, depth)]
    node: list[Json] = ["dataclass", name]
    for field in dataclasses.fields(kind):
        item = encode(getattr(value, field.name), take, f"{path}.{field.name}", depth + 1)
        node += [field.name, item]
    return node


def _is_namedtuple(kind: type) -> bool:
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def _why_not_dataclass(value: Any) -> str:
    names = [field.name for field in dataclasses.fields(value)]
    if missing := [name for name in names if not hasattr(value, name)]:
        return f"its field {missing[0]!r} is not set"
    try:
        object.__new__(type(value))
    except TypeError:
        return f"{type(value).__name__} is more than a dataclass"
    return _beside(value, names)


def _beside(value: Any, names: Iterable[str]) -> str:
    others = getattr(value, "__dict__", {}).keys() - set(names)
    return f"it has attributes beside its fields: {', '.join(sorted(others))}" if others else ""


def _find_type(name: str) -> Any:
    """What is called so in this program; without importing, or running, anything."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        if not isinstance(found, ModuleType | type):
            return None
        found = vars(found).get(part)
    return found


def _build(kind: type, values: dict[str, Any]) -> Any:
    """A dataclass with these fields, without a call of its constructor."""
    made: Any = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _type_named(items: list[Json], what: str, is_kind: Callable[[type], bool]) -> Any:
    name = items[0]
    kind = _find_type(name) if isinstance(name, str) else None
    if not isinstance(kind, type) or not is_kind(kind):
        raise BadTree(
            f"this program has no {what} {str(name)[:80]!r}: define or import it here too"
        )
    return kind


def _read_namedtuple(items: list[Json], tensors: Sequence[torch.Tensor], depth: int) -> Any:
    kind = _type_named(items, "namedtuple", _is_namedtuple)
    if len(items) - 1 != len(kind._fields):
        raise BadTree(f"{kind.__name__} has {len(kind._fields)} fields here, not {len(items) - 1}")
    return tuple.__new__(kind, [decode(item, tensors, depth + 1) for item in items[1:]])


def _read_dataclass(items: list[Json], tensors: Sequence[torch.Tensor], depth: int) -> Any:
    kind = _type_named(items, "dataclass", dataclasses.is_dataclass)
    theirs, ours = items[1::2], [field.name for field in dataclasses.fields(kind)]
    if theirs != ours or len(items) % 2 == 0:
        raise BadTree(f"{kind.__name__} has the fields {ours} here, not {theirs}"[:400])
    return _build(
        kind,
        {n: decode(item, tensors, depth + 1) for n, item in zip(ours, items[2::2], strict=True)},
    )


def _read_enum(items: list[Json], tensors: Sequence[torch.Tensor], depth: int) -> Any:
    kind = _type_named(items, "enum", lambda kind: issubclass(kind, enum.Enum))
    _, name = items
    if name not in kind.__members__:
        raise BadTree(f"{kind.__name__} has no member {str(name)[:40]!r} here")
    return kind.__members__[name]


def _read_flag(items: list[Json], tensors: Sequence[torch.Tensor], depth: int) -> Any:
    kind = _type_named(items, "flag", lambda kind: issubclass(kind, enum.Flag))
    _, value = items
    return kind(decode(value, (), depth + 1))


_READERS: dict[str, Callable[[list[Json], Sequence[torch.Tensor], int], Any]] = {
    "d": _read_dict(dict),
    "o": _read_dict(OrderedDict),
    "C": _read_dict(Counter),
    "l": _read_sequence(list),
    "t": _read_sequence(tuple),
    "n": lambda items, tensors, _: tensors[_index(items, len(tensors))].cpu().numpy().copy(),
    "z": lambda items, tensors, _: torch.Size(_sizes(items)),
    "array": _read_array,
    "scalar": _read_scalar,
    "defaultdict": _read_defaultdict,
    "metadata": _read_metadata,
    "deque": _read_deque,
    "set": _read_set(set),
    "frozenset": _read_set(frozenset),
    "datetime": _read_clock(dt.datetime),
    "time": _read_clock(dt.time),
    "namedtuple": _read_namedtuple,
    "dataclass": _read_dataclass,
    "enum": _read_enum,
    "flag": _read_flag,
}


def _refused(value: object, path: str, reason: str) -> ConfigError:
    return ConfigError(field=path, value=type(value).__name__, reason=reason)


def _index(items: list[Json], count: int) -> int:
    if len(items) == 1 and type(items[0]) is int and 0 <= items[0] < count:
        return items[0]
    raise BadTree("a tensor is named that is not in the table")


def _sizes(items: list[Json]) -> list[int]:
    if all(type(item) is int and 0 <= item < _SMALL_INT for item in items):
        return items
    raise BadTree("a torch.Size holds something else than sizes")
