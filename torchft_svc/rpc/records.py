"""Copies the fields of a record to the message of the same names, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, TypeVar, cast

from google.protobuf.message import Message

from torchft_svc.core.limits import MAX_DURATION_S
from torchft_svc.errors import RequestRefused

R = TypeVar("R")
M = TypeVar("M", bound=Message)


def _same(value: Any) -> Any:
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """How one field of a record is sent, if not unchanged under its own name.

    ``name``: on the wire (empty: the record's). An absent field is read as the record's default,
    and without one as None, or as an empty message.
    """

    name: str = ""
    to_wire: Callable[[Any], Any] = _same
    from_wire: Callable[[Any], Any] = _same


def numbered(numbers: Mapping[Any, int], default: Any = None) -> Field:
    """A value of an enum, sent as its number; any other number is read as ``default``."""
    values = {number: value for value, number in numbers.items()}
    return Field("", numbers.__getitem__, lambda number: values.get(number, default))


def milliseconds(name: str) -> Field:
    """A duration in seconds (None: absent), sent as milliseconds under ``name``."""
    return Field(
        name,
        lambda seconds: None if seconds is None else round(seconds * 1000),
        lambda number: number / 1000,
    )


def within(name: str) -> Field:
    """A time limit in seconds (None: absent), sent as milliseconds under ``name``, and bounded."""
    return Field(
        name,
        lambda seconds: None if seconds is None else round(seconds * 1000),
        lambda number: min(max(number / 1000, 0.0), MAX_DURATION_S),
    )


class Codec(Generic[R, M]):
    """Copies records of one class to messages of one class, and back.

    ``fields``: those that are not sent unchanged under their own name. ``local``: fields of the
    record that are not sent, and ``apart``: fields of the message that the record lacks; the caller
    adds both. Each other field has to exist on both sides, or the module cannot be imported.
    ``texts`` is applied to all texts, both ways. ``checks``: whether `from_wire` calls the record's
    ``check``.
    """

    def __init__(
        self,
        record: type[R],
        message: type[M],
        *,
        fields: Mapping[str, Field] | None = None,
        local: Collection[str] = (),
        apart: Collection[str] = (),
        texts: Callable[[str], str] | None = None,
        checks: bool = False,
    ) -> None:
        self.record = record
        self._checks = checks
        described = dict(fields or {})
        on_wire: dict[str, Any] = dict(message.DESCRIPTOR.fields_by_name)
        # What the two expressions below refer to.
        scope: dict[str, Any] = {"Record": record, "Message": message}
        encoded, decoded = [], []
        for each in dataclasses.fields(cast("Any", record)):
            name = each.name
            if name in local:
                continue
            field = described.pop(name, Field())
            kind = on_wire.pop(field.name or name)
            if texts is not None and kind.type == kind.TYPE_STRING and field == Field():
                field = Field("", texts, texts)
            if kind.is_repeated and field == Field():
                field = Field(from_wire=tuple)
            scope |= {f"to_{name}": field.to_wire, f"from_{name}": field.from_wire}
            scope[f"absent_{name}"] = None if each.default is dataclasses.MISSING else each.default
            value = f"record.{name}" if field.to_wire is _same else f"to_{name}(record.{name})"
            encoded.append(f"{kind.name}={value}")
            value = f"message.{kind.name}"
            value = value if field.from_wire is _same else f"from_{name}({value})"
            is_needed = kind.message_type is not None and each.default is dataclasses.MISSING
            if kind.has_presence and not is_needed:
                value += f" if message.HasField({kind.name!r}) else absent_{name}"
            decoded.append(f"{name}={value}")
        assert not described, f"{record.__name__} has no fields {sorted(described)}"
        assert set(on_wire) == set(apart), f"{record.__name__} has no fields {sorted(on_wire)}"
        # One expression is as fast as one written by hand: a loop over the fields takes half as
        # long again, and a lighthouse copies a thousand members for each quorum. Only names of
        # fields get into it, as into the methods that `dataclasses` makes.
        self.to_wire: Callable[[R], M] = eval(  # noqa: S307
            f"lambda record: Message({', '.join(encoded)})", scope
        )
        self._decode: Callable[..., R] = eval(  # noqa: S307
            f"lambda message, local: Record({', '.join(decoded)}, **local)", scope
        )

    def from_wire(self, message: M, **local: Any) -> R:
        """The record with the fields of ``message``, and its ``local`` ones.

        Raises:
            RequestRefused: a field is out of bounds.
        """
        record: Any = self._decode(message, local)
        if self._checks:
            record.check()
        return cast("R", record)


def list_of(codec: Codec[Any, Any]) -> Field:
    """A tuple of records, sent as a list of the messages of ``codec``."""
    return Field(
        "",
        lambda records: map(codec.to_wire, records),
        lambda messages: tuple(map(codec.from_wire, messages)),
    )


class HandWritten(Generic[R, M]):
    """A `Codec` that is two functions, for a record that is not like its message."""

    def __init__(
        self, record: type[R], to_wire: Callable[[R], M], from_wire: Callable[[M], R]
    ) -> None:
        self.record, self.to_wire, self.from_wire = record, to_wire, from_wire


class OneOf(Generic[M]):
    """One direction of a stream: ``kinds`` has the codec of each field of the message's oneof.

    ``what`` names the stream in the reason for which a message of no known kind is refused.
    """

    def __init__(
        self,
        message: type[M],
        what: str,
        kinds: Mapping[str, Codec[Any, Any] | HandWritten[Any, Any]],
    ) -> None:
        self._message = message
        self._what = what
        self._codecs = kinds
        self._kinds = {codec.record: kind for kind, codec in kinds.items()}

    def to_wire(self, record: Any) -> M:
        """The message with ``record``."""
        kind = self._kinds[type(record)]
        return self._message(**{kind: self._codecs[kind].to_wire(record)})

    def from_wire(self, message: M) -> Any:
        """The record in ``message``.

        Raises:
            RequestRefused: it has none of a known kind, or one that is out of bounds.
        """
        kind = message.WhichOneof("kind")
        codec = self._codecs.get(kind)
        if codec is None:
            raise RequestRefused(f"{self._what} does not accept {kind or 'an empty message'}")
        return codec.from_wire(getattr(message, kind))
