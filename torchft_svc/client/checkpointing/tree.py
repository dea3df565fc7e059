"""Writes a state's nesting as JSON and reads it back; tensors are left to a table of their own.

null, booleans, strings, finite floats and small integers stand for themselves. Everything else is
an array that begins with a tag:

    ["d", key, value, ...]  dict        ["o", ...]  OrderedDict     ["l", ...]  list
    ["t", ...]  tuple                   ["z", ...]  torch.Size      ["T", n]    tensor n
    ["i", "0x.."]  large integer        ["f", "nan"]  float         ["c", re, im]  complex
    ["b", base64]  bytes                ["y", "float32"]  torch.dtype
    ["C", key, count, ...]  Counter     ["n", n]  numpy array, sent as tensor n

Numpy's scalars come back as Python's.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
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
_KEY_TYPES = "str, int, float, bool, None or tuples of these"


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
    if value is None or isinstance(value, bool | float | complex) or type(value) in _SCALARS:
        return _encode_scalar(value)
    if isinstance(value, np.generic | np.ndarray):
        return _encode_numpy(value, take_tensor, path)
    if depth >= MAX_DEPTH:
        raise _refused(value, path[:200], f"it is nested more than {MAX_DEPTH} levels deep")
    if type(value) in _DICT_TAGS:
        assert isinstance(value, dict)
        return _encode_dict(value, take_tensor, path, depth)
    tag = _SEQUENCE_TAGS.get(type(value))
    if tag is None:
        raise _refused(value, path, f"{type(value).__name__} objects cannot be sent")
    assert isinstance(value, list | tuple)
    return [
        tag,
        *(encode(item, take_tensor, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)),
    ]


def decode(node: Json, tensors: Sequence[torch.Tensor], depth: int = 0) -> Any:
    """The value that ``encode`` wrote as ``node``, with ``tensors`` put in their places.

    Raises:
        BadTree: ``node`` is not what ``encode`` writes.
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
    if tag == "n":
        return tensors[_index(items, len(tensors))].numpy().copy()
    if tag in _CONTAINERS:
        return _CONTAINERS[tag](decode(item, tensors, depth + 1) for item in items)
    if tag == "z":
        return torch.Size(_sizes(items))
    if tag in _DICTS:
        return _decode_dict(tag, items, tensors, depth)
    return _decode_scalar(tag, items)


_SCALARS = (int, str, bytes, torch.dtype)
_SEQUENCE_TAGS: dict[type, str] = {list: "l", tuple: "t", torch.Size: "z"}
_CONTAINERS: dict[str, Callable[..., Any]] = {"l": list, "t": tuple}
# A Counter is what torch's MultiStepLR keeps its milestones in.
_DICT_TAGS: dict[type, str] = {dict: "d", OrderedDict: "o", Counter: "C"}
_DICTS: dict[str, Callable[[], dict[Any, Any]]] = {tag: kind for kind, tag in _DICT_TAGS.items()}


def _refused(value: object, path: str, reason: str) -> ConfigError:
    return ConfigError(field=path, value=type(value).__name__, reason=reason)


def _encode_scalar(value: object) -> Json:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if abs(value) < _SMALL_INT else ["i", hex(value)]
    if isinstance(value, float):  # also numpy's float64, which schedulers leave behind
        return float(value) if math.isfinite(value) else ["f", repr(float(value))]
    if isinstance(value, complex):
        return ["c", _encode_scalar(value.real), _encode_scalar(value.imag)]
    if isinstance(value, bytes):
        return ["b", base64.b64encode(value).decode("ascii")]
    assert isinstance(value, torch.dtype)
    return ["y", str(value).removeprefix("torch.")]


def _encode_numpy(value: np.generic | np.ndarray[Any, Any], take: TakeTensor, path: str) -> Json:
    if isinstance(value, np.generic):
        plain = value.item()
        if isinstance(plain, bool | int | float | complex | str | bytes):
            return _encode_scalar(plain)
        raise _refused(value, path, f"{type(value).__name__} objects cannot be sent")
    try:
        return ["n", take(torch.from_numpy(value.copy()), path)]
    except (TypeError, ValueError) as error:
        raise _refused(value, path, f"arrays of {value.dtype} cannot be sent") from error


def _decode_scalar(tag: str, items: list[Json]) -> Any:
    if tag == "c" and len(items) == 2:
        real, imag = (decode(item, (), MAX_DEPTH) for item in items)
        if isinstance(real, float) and isinstance(imag, float):
            return complex(real, imag)
    elif len(items) == 1 and isinstance(items[0], str):
        text = items[0]
        try:
            if tag == "i":
                return int(text, 16)
            if tag == "f":
                return float(text)
            if tag == "b":
                return base64.b64decode(text, validate=True)
        except ValueError as error:
            raise BadTree(f"a value of kind {tag!r} cannot be read") from error
        if tag == "y":
            if text not in DTYPES:
                raise BadTree(f"this build of torch has no dtype {text[:40]!r}")
            return DTYPES[text]
    raise BadTree(f"unknown kind {tag[:20]!r}")


def _encode_dict(value: dict[Any, Any], take: TakeTensor, path: str, depth: int) -> Json:
    node: list[Json] = [_DICT_TAGS[type(value)]]
    for key, item in value.items():
        if not _is_key(key):
            raise _refused(key, path, f"the key {str(key)[:40]!r} is not one of {_KEY_TYPES}")
        node.append(encode(key, take, path, depth + 1))
        node.append(encode(item, take, f"{path}[{key!r}]", depth + 1))
    return node


def _decode_dict(tag: str, items: list[Json], tensors: Sequence[torch.Tensor], depth: int) -> Any:
    if len(items) % 2:
        raise BadTree("a dict has a key without a value")
    result = _DICTS[tag]()
    for key_node, item in zip(items[::2], items[1::2], strict=True):
        key = decode(key_node, (), depth + 1)
        if not _is_key(key):
            raise BadTree(f"a dict key is not one of {_KEY_TYPES}")
        result[key] = decode(item, tensors, depth + 1)
    return result


def _is_key(key: object, depth: int = 0) -> bool:
    if type(key) is tuple:
        return depth < MAX_DEPTH and all(_is_key(item, depth + 1) for item in key)
    return key is None or type(key) in (str, int, bool) or isinstance(key, float)


def _index(items: list[Json], count: int) -> int:
    if len(items) == 1 and type(items[0]) is int and 0 <= items[0] < count:
        return items[0]
    raise BadTree("a tensor is named that is not in the table")


def _sizes(items: list[Json]) -> list[int]:
    if all(type(item) is int and 0 <= item < _SMALL_INT for item in items):
        return items
    raise BadTree("a torch.Size holds something else than sizes")
