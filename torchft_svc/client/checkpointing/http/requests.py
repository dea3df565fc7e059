"""Parses the requests of receivers, and answers them on one connection.

    GET /<secret>/state/<step>?wait_ms=n&extra=x      a line with the state's id and the
            size of its chunks, and its description, sealed
    GET /<secret>/deferred/<step>?wait_ms=n           the same, of the state sent when the step ends
    GET /<secret>/copy/<step>?wait_ms=n               the same, of the next one above the step that
            is offered to processes that hold copies (rule B3)
    GET /<secret>/chunk/<state id>/<chunk>?receiver=x&verified=n,m   a chunk, sealed
    GET /<secret>/digests/<state id>                  the digests of all chunks, sealed
    GET /<secret>/done/<state id>?receiver=x&verified=n,m            the end; no body
    GET /<secret>/claim/<part>/<step>/<size>/<chunk size>?receiver=x&digests=n.d,m.e    chunks that
            the receiver has at hand, so they need not be kept for it; no body
    GET /<secret>/preview                             the step that this worker is in, sealed
    GET /<secret>/preview/<part>                      of the state as it is now, or of its deferred
            part: its size, that of its chunks, and the digests of all chunks, sealed
    GET /<secret>/preview/<part>/<chunk>              a chunk of that, as it is now, sealed

``extra`` names a receiver that fetches a part of the state although it was not announced.
``verified`` names chunks that need not be kept any more for the receiver. The secret is new in
every process: without a worker's metadata nobody can read its weights. If a token is configured, it
is checked first.
"""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qsl, urlsplit

from torchft_svc.client.checkpointing.http.preview import Preview
from torchft_svc.client.checkpointing.http.served import (
    Gone,
    NotOffered,
    OfferSlot,
    ServedState,
    StateForm,
)
from torchft_svc.client.checkpointing.http.wire import (
    DIGEST_BYTES,
    BadHead,
    Head,
    Wire,
    seal,
)
from torchft_svc.client.checkpointing.transport import encode_reason
from torchft_svc.rpc.security import TOKEN_KEY, Security

log = logging.getLogger(__name__)

# An honest receiver sends a request in one go.
HEAD_TIMEOUT_S = 10.0
# Between two requests a receiver only checks a digest.
IDLE_TIMEOUT_S = 60.0
# Receivers repeat their request after this time, so that a connection never looks dead for longer.
MAX_WAIT_MS = 20_000
# The states that are served side by side, by the first word of their requests.
STATE, DEFERRED, COPY = "state", "deferred", "copy"
_NO_ROOM_FOR_COPY = "as many copies as possible are being fetched"
DESCRIPTION_SEED = 1 << 63  # no chunk has this number

DIGESTS_SEED = DESCRIPTION_SEED + 1
PREVIEW_SEED = DESCRIPTION_SEED + 2
# A number of a preview as text: a step, or a size.
NUMBER_BYTES = 20

MAX_FIRST_LINE_BYTES = 64
# The most chunks that one request can name, and name with their digests: they fit into a head.
MAX_CLAIMED = 150
MAX_VERIFIED = 200
TOO_EARLY, GONE, BUSY, UNAUTHORIZED, NOT_FOUND = 425, 410, 503, 401, 404
_LINE = re.compile(r"([A-Z]{1,16}) (/[!-~]*) HTTP/(\d\.\d)")
_NUMBER = re.compile(r"\d{1,18}")
_CLAIM = re.compile(r"\d{1,9}\.[0-9a-f]{16}", re.ASCII)
_NAME = re.compile(r"[\w.:-]{1,80}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Request:
    """A well-formed request: the secret that its path begins with, the other parts of the path, and
    its query."""

    secret: str
    parts: tuple[str, ...]
    query: dict[str, str]

    @property
    def path(self) -> str:
        """The whole path."""
        return "/".join(("", self.secret, *self.parts))

    def number(self, name: str) -> int | None:
        return _number(self.query[name]) if name in self.query else None

    @property
    def receiver(self) -> str:
        return self.name("receiver")

    def name(self, key: str) -> str:
        name = self.query.get(key, "")
        if not _NAME.fullmatch(name):
            raise BadHead(f"the {key} has no proper name")
        return name

    @property
    def claimed(self) -> dict[int, bytes]:
        """The digests of chunks that the receiver has at hand."""
        entries = self.query.get("digests", "").split(",", MAX_CLAIMED)
        if len(entries) > MAX_CLAIMED or not all(map(_CLAIM.fullmatch, entries)):
            raise BadHead("the chunks at hand cannot be read")
        pairs = (entry.split(".") for entry in entries)
        return {int(chunk): bytes.fromhex(digest) for chunk, digest in pairs}

    @property
    def verified(self) -> list[int]:
        chunks = self.query["verified"].split(",", MAX_VERIFIED) if "verified" in self.query else []
        if len(chunks) > MAX_VERIFIED:
            raise BadHead(f"more than {MAX_VERIFIED} chunks at once")
        return [*map(_number, chunks)]


def parse_request(head: Head) -> Request:
    """Understand a request's head.

    Raises:
        BadHead: with the status of the response.
    """
    match = _LINE.fullmatch(head.line)
    if not match:
        raise BadHead("this is not an HTTP request")
    method, target, version = match.groups()
    if version != "1.1":
        raise BadHead(f"HTTP/{version} is not supported, use HTTP/1.1", 505)
    if method != "GET":
        raise BadHead(f"{method} is not supported, use GET", 405)
    if "transfer-encoding" in head.headers or head.headers.get("content-length", "0") != "0":
        raise BadHead("a GET request has no body")
    if "range" in head.headers:
        raise BadHead("ranges are not supported, request chunks", 416)
    try:
        url = urlsplit(target)
        query = dict(parse_qsl(url.query, max_num_fields=8))
    except ValueError as error:
        raise BadHead("the path cannot be read") from error
    secret, *parts = url.path.removeprefix("/").split("/")
    return Request(secret, tuple(parts), query)


@dataclass(frozen=True, slots=True)
class Admission:
    """Callables by which a conversation reports what its connection is for.

    ``verify_peer``: the peer has shown that it may use the connection. ``count_apart``: it is for
    what nobody waits for, and counts apart from the others; returns whether there is room.
    """

    verify_peer: Callable[[], None]
    count_apart: Callable[[], bool]


class Conversation:
    """Answers the requests of one connection; ``admission`` records what it is for."""

    def __init__(
        self,
        wire: Wire,
        slots: dict[str, OfferSlot],
        preview: Preview,
        secret: str,
        security: Security,
        admission: Admission,
    ) -> None:
        self._admission = admission
        self._preview = preview
        self._security = security
        self._wire = wire
        self._slots = slots
        self._secret = secret
        self._claimants: set[str] = set()  # over this connection

    def run(self) -> None:
        """Return when the peer has closed the connection, or sent an invalid request.

        Raises:
            OSError: the connection broke, or timed out.
        """
        try:
            while True:
                self._wire.timeout_s = HEAD_TIMEOUT_S
                head = self._wire.read_head(begin_within_s=IDLE_TIMEOUT_S)
                if head is None:
                    return
                refusal = self._security.refusal(head.headers.get(TOKEN_KEY))
                if refusal is not None:
                    raise BadHead(refusal, UNAUTHORIZED)
                self._answer(parse_request(head))
                if head.headers.get("connection", "").lower() == "close":
                    return
        except BadHead as error:
            refuse(self._wire, error.status, str(error), close=True)
        finally:
            for slot in self._slots.values():
                for receiver in self._claimants:
                    slot.drop_claims(receiver)

    def _answer(self, request: Request) -> None:
        if not hmac.compare_digest(request.secret.encode(), self._secret.encode()):
            raise BadHead("nothing is here", 404)
        self._admission.verify_peer()
        try:
            match request.parts:
                case ("state" | "deferred" as name, step):
                    self._send_description(self._slots[name], _number(step), request)
                case ("chunk", state_id, chunk):
                    self._send_chunk(self._served(state_id, request), _number(chunk))
                case ("digests", state_id):
                    self._send_digests(self._by_id(state_id))
                case ("done", state_id):
                    state = self._served(state_id, request)
                    if not state.num_chunks:
                        state.verified(request.receiver, None)
                    self._send_head(0)
                case ("claim" | "preview" | "copy", *_):
                    self._answer_ahead(request)
                case _:
                    raise BadHead("nothing is here", 404)
        except Gone as error:
            refuse(self._wire, GONE, str(error))
        except NotOffered as error:
            refuse(self._wire, TOO_EARLY, str(error))

    def _count_apart(self, why_not: str) -> None:
        """Keep a connection that nobody waits for from taking the place of one of a heal."""
        if not self._admission.count_apart():
            raise BadHead(why_not, BUSY)

    def _served(self, state_id: str, request: Request) -> ServedState:
        state = self._by_id(state_id)
        for chunk in request.verified:
            state.verified(request.receiver, chunk)
        return state

    def _by_id(self, state_id: str) -> ServedState:
        for name in (DEFERRED, COPY):
            state = self._slots[name].state
            if state is not None and state.state_id == state_id:
                if name == COPY:
                    self._count_apart(_NO_ROOM_FOR_COPY)
                return state
        return self._slots[STATE].by_id(state_id)

    def _send_description(self, slot: OfferSlot, step: int, request: Request) -> None:
        wait_ms = request.number("wait_ms") or 0
        state = slot.wait_for(step, min(wait_ms, MAX_WAIT_MS) / 1000)
        if "extra" in request.query:
            state.admit(request.name("extra"))
        self._wire.timeout_s = state.idle_timeout_s
        first_line = f"{state.state_id} {state.chunk_bytes}\n".encode("ascii")
        body = seal(first_line + state.description, DESCRIPTION_SEED)
        self._send_head(len(body))
        self._wire.send(body)

    def _send_chunk(self, state: ServedState, chunk: int) -> None:
        if chunk >= state.num_chunks:
            raise BadHead(f"there are {state.num_chunks} chunks", 404)
        reading = state.reader(chunk)
        with reading(0, 0):
            pass  # raises `Gone` before the head is sent, while a refusal is still possible
        start, stop = state.bounds(chunk)
        self._wire.timeout_s = state.idle_timeout_s
        self._send_head(stop - start + DIGEST_BYTES)
        try:
            self._wire.send_sealed(
                reading, stop - start, chunk, lambda digest: state.remember(chunk, digest)
            )
        except Gone as error:
            raise ConnectionAbortedError(f"chunk {chunk} went away: {error}") from error

    def _send_digests(self, state: ServedState) -> None:
        """Send each digest as soon as it is computed, so that the peer sees progress."""
        self._wire.timeout_s = state.idle_timeout_s
        self._send_head((state.num_chunks + 1) * DIGEST_BYTES)
        sent = b""
        try:
            for chunk in range(state.num_chunks):
                digest = state.digest(chunk)
                self._wire.send(digest)
                sent += digest
        except Gone as error:
            raise ConnectionAbortedError(f"a chunk went away: {error}") from error
        self._wire.send(seal(sent, DIGESTS_SEED)[len(sent) :])

    def _answer_ahead(self, request: Request) -> None:
        """Answer a request of a receiver that heals later, or waits for the state."""
        if request.parts[0] == "preview":
            self._count_apart("as many groups as possible are fetching in advance")
        match request.parts:
            case ("claim", "state" | "deferred" as name, step, size, chunk_bytes):
                form = StateForm(_number(step), _number(size), _number(chunk_bytes))
                receiver, claimed = request.receiver, request.claimed
                self._claimants.add(receiver)
                self._slots[name].claim(receiver, form, claimed, self._wire.has_peer)
                self._send_head(0)
            case ("copy", step):
                self._count_apart(_NO_ROOM_FOR_COPY)
                self._send_description(self._slots[COPY], _number(step), request)
            case ("preview",):
                self._send_step()
            case ("preview", "state" | "deferred" as name):
                self._send_preview(is_deferred=name == DEFERRED)
            case ("preview", "state" | "deferred" as name, chunk):
                self._send_preview_chunk(_number(chunk), is_deferred=name == DEFERRED)
            case _:
                raise BadHead("nothing is here", 404)

    def _send_step(self) -> None:
        body = seal(_fixed(self._preview.step()), PREVIEW_SEED)
        self._send_head(len(body))
        self._wire.send(body)

    def _send_preview(self, *, is_deferred: bool) -> None:
        """Send each digest as soon as it is computed, so that the peer sees progress."""
        shown = self._preview.collect(is_deferred=is_deferred)
        self._wire.timeout_s = IDLE_TIMEOUT_S
        sent = _fixed(shown.memory.size) + _fixed(shown.chunk_bytes)
        self._send_head(len(sent) + (shown.num_chunks + 1) * DIGEST_BYTES)
        self._wire.send(sent)
        for chunk in range(shown.num_chunks):
            digest = self._preview.digest(shown, chunk)
            self._wire.send(digest)
            sent += digest
        self._wire.send(seal(sent, PREVIEW_SEED)[len(sent) :])

    def _send_preview_chunk(self, chunk: int, *, is_deferred: bool) -> None:
        shown = self._preview.shown(is_deferred=is_deferred)
        if chunk >= shown.num_chunks:
            raise BadHead(f"there are {shown.num_chunks} chunks", 404)
        start, stop = shown.bounds(chunk)
        self._wire.timeout_s = IDLE_TIMEOUT_S
        self._send_head(stop - start + DIGEST_BYTES)
        reading = self._preview.reader(shown, chunk)
        self._wire.send_sealed(reading, stop - start, chunk, lambda digest: None)

    def _send_head(self, length: int) -> None:
        self._wire.send(f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n".encode("ascii"))


def refuse(wire: Wire, status: int, reason: str, *, close: bool = False) -> None:
    """Answer with ``status``, and ``reason`` as the body."""
    body = encode_reason(f"{reason}\n")
    closing = "Connection: close\r\n" if close else ""
    if status == UNAUTHORIZED:
        closing += "WWW-Authenticate: Bearer\r\n"
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: text/plain\r\n"
        f"{closing}Content-Length: {len(body)}\r\n\r\n"
    )
    wire.send(head.encode("ascii") + body)


def _fixed(number: int) -> bytes:
    return f"{number:0{NUMBER_BYTES}d}".encode("ascii")


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise BadHead(f"{text[:20]!r} is not a number")
    return int(text)
