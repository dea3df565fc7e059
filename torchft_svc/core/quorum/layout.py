"""The layout of a group: what its workers reduce, and how; equal in all groups (rule Q21)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections.abc import Sequence
from itertools import zip_longest

from torchft_svc.core.limits import MAX_NAME_LENGTH
from torchft_svc.core.quorum.types import MAX_LAYOUT_LENGTH, Member

# Of a digest in hexadecimal: nobody meets another one by chance.
DIGEST_LENGTH = 16
# Of what is compared. The rest of a layout is room for names.
_MAX_TEXT_LENGTH = MAX_LAYOUT_LENGTH // 4
# What precedes the packed names of the parameters at the end of a layout.
_NAMES_MARK = "; names "
# Unpacked: far more than what fits into a layout, unless it was made to harm the lighthouse.
_MAX_NAMES_BYTES = 64 * 1024


def describe_layout(parts: Sequence[str], settings: str, names: Sequence[str]) -> str:
    """The layout of a worker, of at most `MAX_LAYOUT_LENGTH` characters.

    Args:
        parts: what each wrapper of a model sums, as a sentence with a digest.
        settings: what else must be equal.
        names: the parameters of all wrappers in order. They only serve to explain a difference:
            the digests cover them. Left out where they are too long even when packed.
    """
    text = "; ".join([*parts, settings])
    if len(text) > _MAX_TEXT_LENGTH:
        text = _cut(text, f"; in all {_digest(text)}")
    return _with_names(text, _pack(names)) if names else text


def group_layout(layouts: list[str]) -> str:
    """The layout of a group, from its workers' ``layouts`` in order of group rank."""
    if not all(layouts):
        return ""
    texts = [_split(layout)[0] for layout in layouts]
    if len(set(texts)) == 1:
        return layouts[0]
    digest = _digest("\n".join(texts))
    text = _cut(texts[0], f"; on all {len(layouts)} workers {digest}")
    return _with_names(text, _split(layouts[0])[1])


def why_unlike(asker: Member, other: Member) -> str:
    (mine, my_names), (theirs, their_names) = _split(asker.layout), _split(other.layout)
    return (
        f"{asker.replica_id!r} differs from {other.replica_id!r}: all groups of a job need the "
        "same model, with the same names in the same order, in the same memory formats, wrapped in "
        "the same way, and the same settings; start this group like the others, or as another job. "
        f"{_first_difference(asker, _unpack(my_names), other, _unpack(their_names))}"
        f"{asker.replica_id!r}: {mine}. {other.replica_id!r}: {theirs}"
    )


def _first_difference(
    asker: Member, mine: Sequence[str], other: Member, theirs: Sequence[str]
) -> str:
    """A sentence on the first parameter that differs; empty if none does, or it is not known."""
    if not (mine and theirs):
        return ""
    for number, (here, there) in enumerate(zip_longest(mine, theirs, fillvalue="missing")):
        if here != there:
            return (
                f"The first difference is parameter {number}: "
                f"{here[:MAX_NAME_LENGTH]} in {asker.replica_id!r}, "
                f"{there[:MAX_NAME_LENGTH]} in {other.replica_id!r}. "
            )
    return ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def _cut(text: str, tail: str) -> str:
    return text[: _MAX_TEXT_LENGTH - len(tail)] + tail


def _with_names(text: str, packed: str) -> str:
    """``text``, and the names if they fit as a whole."""
    whole = f"{text}{_NAMES_MARK}{packed}"
    return whole if packed and len(whole) <= MAX_LAYOUT_LENGTH else text


def _split(layout: str) -> tuple[str, str]:
    """The text of a layout, and its packed names."""
    text, _, packed = layout.partition(_NAMES_MARK)
    return text, packed


def _pack(names: Sequence[str]) -> str:
    """``names`` as few printable characters: those of 1000 parameters need about 3000."""
    shown = [name if name.isprintable() else ascii(name) for name in names]
    return base64.b85encode(zlib.compress("\n".join(shown).encode(), 9)).decode()


def _unpack(packed: str) -> list[str]:
    """The names from `_pack`; none if another peer has sent anything else."""
    try:
        inflate = zlib.decompressobj()
        text = inflate.decompress(base64.b85decode(packed), _MAX_NAMES_BYTES).decode()
    except (ValueError, binascii.Error, zlib.error):
        return []
    names = text.split("\n")
    return names if inflate.eof and all(name.isprintable() for name in names) else []


def layouts_differ(one: Member, other: Member) -> bool:
    """Whether the layouts differ, without the packed names, which depend on the version of zlib."""
    return bool(one.layout and other.layout) and _split(one.layout)[0] != _split(other.layout)[0]
