"""Encodes a state's nesting as JSON, and decodes it; tensors are in a separate table (rule H8).

null, booleans, strings, finite floats and small integers stand for themselves. Everything else is
an array that starts with a tag:

    ["d", key, value, ...]  dict        ["o", ...]  OrderedDict     ["l", ...]  list
    ["t", ...]  tuple                   ["z", ...]  torch.Size      ["T", n]    tensor n
    ["i", "0x.."]  large integer        ["f", "nan"]  float         ["c", re, im]  complex
    ["b", base64]  bytes                ["y", "float32"]  torch.dtype
    ["C", key, count, ...]  Counter     ["n", n]  numpy array, sent as tensor n

Other tags are names: ``set``, ``frozenset``, ``deque``, ``defaultdict``, ``metadata`` (an
OrderedDict with torch's ``_metadata``), ``array`` and ``scalar`` (numpy), ``datetime`` and the
like, ``namedtuple``, ``dataclass``, ``enum``, ``flag``.

The last four contain a type of the program as ``module:name``. The receiver looks it up in modules
that are already imported; nothing is imported, and no constructor is called.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from torchft_svc.client.checkpointing.encoding.values import (
    SCALAR_TAGS,
    SCALARS,
    SMALL_INT,
    BadTree,
    Json,
    encode_numpy,
    make_array,
    make_scalar,
    refused,
    sizes,
)
from torchft_svc.errors import ConfigError

# Deeper nesting is an error (a list that contains itself) or an attack on the reader's stack.
MAX_DEPTH = 64

TakeTensor = Callable[[torch.Tensor, str], int]


def encode(
    value: object, take_tensor: TakeTensor, path: str = "state_dict", depth: int = 0
) -> Json:
    """``value`` as JSON; ``take_tensor`` returns a number for each tensor and its path.

    Raises:
        ConfigError: a value that cannot be sent; its field is the path in the tree.
    """
    if isinstance(value, torch.Tensor):
        return ["T", take_tensor(value, path)]
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind in SCALARS:
        tag, write_plain, _ = SCALARS[kind]
        plain = write_plain(value)
        return [tag, *plain] if isinstance(plain, list) else plain
    if depth >= MAX_DEPTH:
        raise refused(value, path[:200], f"it is nested more than {MAX_DEPTH} levels deep")
    write = _WRITERS.get(kind)
    if write is not None:
        return write(value, take_tensor, path, depth)
    if isinstance(value, np.generic | np.ndarray):
        return encode_numpy(value, take_tensor, path)
    return _encode_typed(value, take_tensor, path, depth)


def decode(node: Json, tensors: Sequence[torch.Tensor], depth: int = 0) -> Any:
    """The value that ``encode`` wrote as ``node``, with ``tensors`` inserted.

    Raises:
        BadTree: ``node`` is malformed, or contains a type that this program does not have.
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
        if tag in SCALAR_TAGS:
            return SCALAR_TAGS[tag](*items)
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
    """``value`` with ``change`` applied to every node, top down; changed nodes are not entered.

    Containers are copied, leaves are not; types that cannot be sent stay unchanged.
    """
    changed = change(value)
    if changed is not value:
        return changed
    kind = type(value)
    if kind in _DICTS:
        result = defaultdict(value.default_factory) if kind is defaultdict else kind()
        for key, item in value.items():  # not with update(), which counts pairs in a Counter
            result[key] = map_nodes(item, change)
        if kind is OrderedDict:
            vars(result).update(vars(value))
        return result
    if kind in (list, tuple):
        return kind(map_nodes(item, change) for item in value)
    if kind is deque:
        return deque((map_nodes(item, change) for item in value), value.maxlen)
    if _is_namedtuple(kind) and not _beside(value, ()):
        return tuple.__new__(kind, [map_nodes(item, change) for item in value])
    if dataclasses.is_dataclass(kind) and not _why_not_dataclass(value):
        names = [field.name for field in dataclasses.fields(kind)]
        return _build(kind, {name: map_nodes(getattr(value, name), change) for name in names})
    return value


def tensor_places(node: Json) -> list[tuple[tuple[str, ...], int]]:
    """The paths of the tensors in an encoded tree, and their numbers."""
    if not isinstance(node, list) or not node:
        return []
    tag, items = node[0], node[1:]
    if tag in ("T", "n", "array"):
        return [((), _index(items[-1:], SMALL_INT))]
    steps: list[str] = [f"{tag}{place}" for place in range(len(items))]
    if tag in _KEYED:
        first = _KEYED[tag]
        steps[first + 1 :: 2] = map(json.dumps, items[first::2])
    return [
        ((step, *path), number)
        for step, item in zip(steps, items, strict=True)
        for path, number in tensor_places(item)
    ]


# -- containers ----------------------------------------------------------------------------------

_SEQUENCES: dict[type, str] = {list: "l", tuple: "t", torch.Size: "z"}
# Torch's MultiStepLR keeps its milestones in a Counter.
_DICTS: dict[type, str] = {dict: "d", OrderedDict: "o", Counter: "C", defaultdict: "defaultdict"}
# Tags of keys and values, and the index of the first key: after a factory, or a type.
_KEYED = {"d": 0, "o": 0, "C": 0, "defaultdict": 1, "dataclass": 1}
# The allowed default factories of a defaultdict: builtin types only.
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
    """Sorted: the descriptions of one state are compared between its sources."""
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
            raise refused(value, path, f"its default_factory is {factory!r}; use one of {known}")
        node.append(None if factory is None else name)
    for key, item in value.items():
        node.append(_encode_key(key, path, depth))
        node.append(encode(item, take, f"{path}[{key!r}]", depth + 1))
    attributes = vars(value) if isinstance(value, OrderedDict) else {}
    if attributes.keys() - {"_metadata"}:
        raise refused(value, path, f"it has attributes of its own: {', '.join(attributes)}")
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
        raise refused(key, path, reason) from error


def _take_no_tensor(tensor: torch.Tensor, path: str) -> int:
    raise refused(tensor, path, "a tensor is no key")


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


def _read_array(items: list[Json], tensors: Sequence[torch.Tensor], depth: int) -> Any:
    text, shape, number = items
    return make_array(text, shape, tensors[_index([number], len(tensors))])


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
        raise refused(value, path, f"{kind.__name__} objects cannot be sent")
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _find_type(name) is not kind:
        reason = f"the type {kind.__qualname__} has to be defined at the top of a module, by name"
        raise refused(value, path, reason)
    if isinstance(value, enum.Flag):
        return ["flag", name, encode(value.value, take, path, depth + 1)]
    if is_enum:
        return ["enum", name, value.name]
    reason = _why_not_dataclass(value) if is_dataclass else _beside(value, ())
    if reason:
        raise refused(value, path, reason)
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
    """The object of this name in this program; imports and runs nothing."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        if not isinstance(found, ModuleType | type):
            return None
        found = vars(found).get(part)
    return found


def _build(kind: type, values: dict[str, Any]) -> Any:
    """A dataclass instance with these fields, without a call of its constructor."""
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
    "z": lambda items, tensors, _: torch.Size(sizes(items)),
    "array": _read_array,
    "scalar": lambda items, tensors, depth: make_scalar(*items),
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


def _index(items: list[Json], count: int) -> int:
    if len(items) == 1 and type(items[0]) is int and 0 <= items[0] < count:
        return items[0]
    raise BadTree("a tensor is named that is not in the table")
