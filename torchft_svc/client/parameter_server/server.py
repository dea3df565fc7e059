"""Serves sessions to clients: `ParameterServer`."""

from __future__ import annotations

import abc
import json
import logging
import threading
import uuid
from datetime import timedelta
from typing import ClassVar

from torch._C._distributed_c10d import TCPStore

from torchft_svc.client.checkpointing.http.connections import ConnectionServer
from torchft_svc.client.checkpointing.http.requests import (
    HEAD_TIMEOUT_S,
    NOT_FOUND,
    UNAUTHORIZED,
    Admission,
    parse_request,
    refuse,
)
from torchft_svc.client.checkpointing.http.source import Refused, Source
from torchft_svc.client.checkpointing.http.wire import BadHead, Wire
from torchft_svc.client.parameter_server.session import CLIENT, SERVER, SessionGroup
from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.core.limits import check_not_empty
from torchft_svc.errors import AddressError, PeerError, SessionEnded, Unreachable
from torchft_svc.host.address import HostPort, parse_address, resolvable_host
from torchft_svc.rpc.security import TOKEN_KEY, Security, security_or_environment
from torchft_svc.settings import positive_s

log = logging.getLogger(__name__)

_WHAT = "parameter server"
_PATH = "new_session"
# A client that keeps the connection open after the answer, as the session's lifeline. One of the
# public release closes it.
_LIFELINE = "lifeline"
# Two short strings.
_MAX_ANSWER_BYTES = 4096
DEFAULT_TIMEOUT = timedelta(seconds=60)
# A server that is gone or frozen must not keep a client for longer than the sessions' own limits.
_STORE_TIMEOUT = timedelta(seconds=60)


class ParameterServer(abc.ABC):
    """A server for tensors whose clients come and go; each client has a session of its own.

    A session is a process group of two: the server is rank 0, the client rank 1. What they send
    each other is up to the program: the server runs `forward` once for each session, on a thread
    of its own, and the client uses the group that `new_session` returns. What sessions share is the
    subclass's to protect by a lock.

    When a client leaves, dies or is cut off, the collectives of its session fail at the server with
    `SessionEnded`, and the session ends; others are not affected. A client notices the end of the
    server in the same way: at once if the process is gone, after 5 s of silence if it is frozen.

    Serves until `shutdown`; a context manager.

    Args:
        port: for the requests of sessions, over HTTP; 0: any free one.
        store_port: for the store where the members of a session meet; 0: any free one.
        bind_host: the address to listen at for requests (default: all interfaces). Torch's store
            always listens on all.
        hostname: the host that clients reach (default: ``bind_host``, or this machine's name).
        security: TLS files and token (default: the environment's), as for checkpoints. The tensors
            themselves and the store are not encrypted.

    Raises:
        AddressError: a port cannot be bound.
        ConfigError: an invalid name, file or token.
    """

    _group_class: ClassVar[type[SessionGroup]] = SessionGroup

    def __init__(
        self,
        port: int,
        store_port: int = 0,
        *,
        bind_host: str = "",
        hostname: str | None = None,
        security: Security | None = None,
    ) -> None:
        check_not_empty("hostname", hostname)
        self._security = security_or_environment(security)
        self._host = hostname or bind_host or resolvable_host()
        self._lock = threading.Lock()
        self._sessions: set[SessionGroup] = set()
        self._is_shut_down = False
        # None after the shutdown: its port is bound as long as it is there.
        self._store: TCPStore | None = _host_store(self._host, store_port)
        self._store_place = HostPort(self._host, self._store.port)
        self._server = ConnectionServer(self._converse, "session", bind_host, port, self._security)
        self._server.start()

    def address(self) -> str:
        """The URL at which clients request sessions."""
        scheme = "https" if self._security.serves_tls else "http"
        return f"{scheme}://{HostPort(self._host, self._server.port)}/{_PATH}"

    @classmethod
    @abc.abstractmethod
    def new_process_group(cls) -> ProcessGroup:
        """Return a new group without members, for one end of a session.

        Its timeout limits how long either end waits for the other.
        """

    @abc.abstractmethod
    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        """Serve one session; runs on the session's own thread.

        The session ends when this returns. An exception ends this session only, and is logged.

        Args:
            session_id: unique.
            pg: this server (rank 0) and the client (rank 1).
        """

    @classmethod
    def new_session(
        cls,
        address: str,
        *,
        timeout: timedelta = DEFAULT_TIMEOUT,
        security: Security | None = None,
    ) -> ProcessGroup:
        """Begin a session, as a client; call ``shutdown()`` of the returned group at its end.

        The client is rank 1 of the group, the server rank 0.

        Args:
            address: what `address` has returned at the server.
            timeout: how long to wait for the server's answer; connecting then takes at most the
                timeout of `new_process_group`.
            security: TLS files and token (default: the environment's).

        Raises:
            AddressError: ``address`` is no address of a parameter server.
            Unauthorized: the token or the certificates do not fit.
            PeerError: the server cannot be reached, has no room, or is gone.
        """
        pg = cls.new_process_group()  # first: if that raises, no server waits for a client
        wire, session_id, store_addr = _request_session(
            address, positive_s("timeout", timeout), security_or_environment(security)
        )
        group = cls._group_class(pg, CLIENT, wire)
        try:
            group.connect(store_addr, session_id)
        except BaseException:
            group.shutdown()
            raise
        return group

    def shutdown(self) -> None:
        """End all sessions, stop serving, and free both ports; idempotent."""
        with self._lock:
            self._is_shut_down = True
            sessions = list(self._sessions)
        for group in sessions:
            group.end_session(SessionEnded(SERVER, "it is shutting down"), grace_s=0.0)
        self._server.close()
        self._store = None

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _converse(self, wire: Wire, admission: Admission) -> None:
        wire.timeout_s = HEAD_TIMEOUT_S
        try:
            head = wire.read_head()
            if head is None:
                return
            refusal = self._security.refusal(head.headers.get(TOKEN_KEY))
            if refusal is not None:
                raise BadHead(refusal, UNAUTHORIZED)
            request = parse_request(head)
            if request.path != f"/{_PATH}":
                raise BadHead(f"nothing is here but /{_PATH}", NOT_FOUND)
        except BadHead as error:
            refuse(wire, error.status, str(error), close=True)
            return
        admission.verify_peer()
        session_id = uuid.uuid4().hex
        store_addr = f"{self._store_place}/session/{session_id}"
        body = json.dumps({"session_id": session_id, "store_addr": store_addr}).encode()
        wire.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        self._run_session(session_id, store_addr, wire if _LIFELINE in request.query else None)

    def _run_session(self, session_id: str, store_addr: str, wire: Wire | None) -> None:
        group = self._group_class(self.new_process_group(), SERVER, wire)
        try:
            with self._lock:
                if self._is_shut_down:
                    return
                self._sessions.add(group)
            group.connect(store_addr, session_id)
            self.forward(session_id, group)
        except PeerError as error:
            log.info("session %s has ended: %s", session_id, error)
        except Exception:
            log.exception("session %s has failed", session_id)
        finally:
            with self._lock:
                self._sessions.discard(group)
            group.shutdown()
            self._forget(session_id)

    def _forget(self, session_id: str) -> None:
        """Delete what a session has left in the store."""
        store = self._store
        if store is None or not hasattr(store, "list_keys"):
            return  # torch 2.7 cannot list them: a few short keys of each session stay
        for key in store.list_keys():
            if session_id in key:
                store.delete_key(key)


def _request_session(address: str, timeout_s: float, security: Security) -> tuple[Wire, str, str]:
    """The connection over which a session was granted, its id and the address of its store."""
    url, _, path = address.rpartition("/")
    if path != _PATH:
        reason = f"is no address of a {_WHAT}, such as http://host:1234/{_PATH}"
        raise AddressError(address, reason)
    source = Source(url, timeout_s, security, _WHAT)
    try:
        answer = source.ask(f"{_PATH}?{_LIFELINE}=1", 0)
        if answer.length > _MAX_ANSWER_BYTES:
            raise BadHead(f"an answer of {answer.length} bytes")
        body = bytearray(answer.length)
        answer.wire.read_into(memoryview(body))
        session = json.loads(body)
        session_id, store_addr = str(session["session_id"]), str(session["store_addr"])
        parse_address(store_addr.partition("/")[0])
    except (BadHead, Refused, KeyError, TypeError, ValueError, OSError) as error:
        source.close()
        if isinstance(error, PeerError | AddressError):
            raise
        reason = f"it did not answer as one: {error}"
        raise Unreachable(_WHAT, source.address, reason) from error
    except BaseException:
        source.close()
        raise
    return answer.wire, session_id, store_addr


def _host_store(host: str, port: int) -> TCPStore:
    try:
        return TCPStore(
            # The server listens on every interface; its own client uses the loopback one.
            "localhost",
            port,
            is_master=True,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
        )
    except RuntimeError as error:
        where = str(HostPort(host, port))
        raise AddressError(where, f"the sessions' store cannot listen: {error}") from error
