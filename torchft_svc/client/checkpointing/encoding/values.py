"""Encodes plain values as JSON, and decodes them: numbers, bytes, dates, paths, numpy values."""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import fractions
import math
import pathlib
import re
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torchft_svc.errors import ConfigError

# Larger integers are written in hexadecimal, which has no limit on the number of digits.
SMALL_INT = 1 << 63

Json = Any

# The tensor dtypes of this build of torch, by the name that is sent.
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
    """A malformed description; the message names the error."""


def refused(value: object, path: str, reason: str) -> ConfigError:
    """The error for a value at ``path`` that cannot be sent."""
    return ConfigError(field=path, value=type(value).__name__, reason=reason)


def _float(value: float) -> Json:
    return value if math.isfinite(value) else ["f", repr(value)]


def _base64(value: bytes | bytearray) -> list[Json]:
    return [base64.b64encode(value).decode("ascii")]


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _complex(real: Json, imag: Json) -> complex:
    parts = [float(part[1]) if isinstance(part, list) else part for part in (real, imag)]
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


def _hexes(*values: int) -> list[Json]:
    return [hex(value) for value in values]


def _from_hex(kind: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *texts: kind(*(int(text, 16) for text in texts))


_Scalar = tuple[str, Callable[[Any], Json], Callable[..., Any]]
# By type: tag, writer (returns a plain value, or a list of them) and reader.
SCALARS: dict[type, _Scalar] = {
    int: ("i", lambda v: v if abs(v) < SMALL_INT else _hexes(v), _from_hex(int)),
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
    zoneinfo.ZoneInfo: ("zone", lambda v: [v.key], zoneinfo.ZoneInfo),
    type(pathlib.Path()): ("path", _name, pathlib.Path),
    pathlib.PurePosixPath: ("posix_path", _name, pathlib.PurePosixPath),
    pathlib.PureWindowsPath: ("windows_path", _name, pathlib.PureWindowsPath),
}
SCALAR_TAGS = {tag: read for tag, _, read in SCALARS.values()}


# -- numpy ---------------------------------------------------------------------------------------

# Booleans, numbers, text and times; no objects or records.
_NUMPY_KINDS = "biufcSUmM"
_NUMPY_TYPE = re.compile(rf"[<>|=][{_NUMPY_KINDS}]\d{{1,9}}(\[\d{{0,9}}[A-Za-z]{{1,7}}\])?")


def encode_numpy(
    value: np.generic | np.ndarray[Any, Any], take: Callable[[torch.Tensor, str], int], path: str
) -> Json:
    """A scalar as its bytes; an array as a tensor for ``take``.

    Raises:
        ConfigError: it cannot be sent.
    """
    dtype = value.dtype
    if dtype.kind not in _NUMPY_KINDS:
        raise refused(value, path, f"numpy values of dtype {dtype} cannot be sent")
    if isinstance(value, np.generic):
        # Even an empty string has some bytes.
        return ["scalar", dtype.str, *_base64(value.tobytes()[: dtype.itemsize])]
    if type(value) is not np.ndarray:
        raise refused(value, path, f"{type(value).__name__} arrays cannot be sent")
    try:
        return ["n", take(torch.from_numpy(value.copy()), path)]
    except (TypeError, ValueError):  # a dtype or byte order that torch does not have
        raw = torch.frombuffer(bytearray(value.tobytes() or b"\0"), dtype=torch.uint8)
        return ["array", dtype.str, list(value.shape), take(raw, path)]


def _numpy_type(text: Json) -> np.dtype[Any]:
    if not isinstance(text, str) or not _NUMPY_TYPE.fullmatch(text):
        raise BadTree("a numpy value has a dtype that is not sent")
    return np.dtype(text)


def make_array(text: Json, shape: Json, raw: torch.Tensor) -> Any:
    """The array with the dtype ``text`` whose bytes are ``raw``."""
    if raw.dtype != torch.uint8:
        raise BadTree("an array is not made of bytes")
    dtype, count = _numpy_type(text), math.prod(sizes(shape))
    data = raw.cpu().numpy().tobytes()
    if count * dtype.itemsize > len(data):
        raise BadTree("an array reaches outside of its bytes")
    return np.ndarray(shape, dtype, data[: count * dtype.itemsize] or b"\0").copy()


def make_scalar(text: Json, encoded: Json) -> Any:
    """The numpy scalar with the dtype ``text``."""
    dtype, data = _numpy_type(text), _bytes(encoded)
    if len(data) != dtype.itemsize:
        raise BadTree("a numpy value has another size than its dtype")
    return np.ndarray((), dtype, data or b"\0")[()]


def sizes(items: list[Json]) -> list[int]:
    """``items``, if they are sizes."""
    if all(type(item) is int and 0 <= item < SMALL_INT for item in items):
        return items
    raise BadTree("a torch.Size holds something else than sizes")
