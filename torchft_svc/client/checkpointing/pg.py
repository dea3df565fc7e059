"""A checkpoint transport over send and recv of a process group, also from device to device."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import xxhash

from torchft_svc.client.checkpointing.encoding.serialization import (
    MAX_DESCRIPTION_BYTES,
    MAX_STATE_BYTES,
    check_state,
)
from torchft_svc.client.checkpointing.encoding.shards import take_apart
from torchft_svc.client.checkpointing.encoding.tensors import MAX_DIMS, TensorTable
from torchft_svc.client.checkpointing.encoding.tree import decode, encode, tensor_places
from torchft_svc.client.checkpointing.encoding.values import DTYPES, BadTree, Json
from torchft_svc.client.checkpointing.transport import (
    MAX_REASON_BYTES,
    CheckpointTransport,
    decode_reason,
    encode_reason,
    why_not_offered,
)
from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    TorchFTError,
    TornState,
)
from torchft_svc.host.uninterruptible import start_uninterruptible
from torchft_svc.settings import positive_s

log = logging.getLogger(__name__)

# A state starts with this, the step, and the length and the digest of the description.
_MAGIC = 0x746F7263686674
# A refusal starts with this, the step, and the length and the digest of the reason.
_REFUSAL = 0x746F7263686E6F
# The longest description or reason.
_LIMITS = {_MAGIC: MAX_DESCRIPTION_BYTES, _REFUSAL: MAX_REASON_BYTES}
# The largest operation: backends count bytes in 32 bits in some places.
MAX_PART_BYTES = 1 << 30
# Gloo closes the connection if a send has not ended by then. A receiver that does not receive
# leaves the group earlier, at the latest with the next quorum.
_LONGEST = timedelta(hours=1)
# A link that is slower may seem to stand still.
_SLOW_BYTES_PER_S = 100e6
# Other sends and receives of a program use small tags.
_TAG = 0x70670000
# The part that is summed at once on a device; the factors take as much memory again.
_SUM_BYTES = 64 << 20
# Odd, so that a product loses no bit of the other operand.
_FACTOR = 0x1E3779B97F4A7C15

Spec = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Description:
    """The nesting, and dtype, shape and digest of each tensor."""

    tree: Json
    specs: list[Spec]
    digests: list[int]
    digest: str  # the digest function, a name in _DIGESTS

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.specs)

    def encode(self) -> bytes:
        tensors = [[str(dtype).removeprefix("torch."), *shape] for dtype, shape in self.specs]
        document = {"tree": self.tree, "tensors": tensors, "digests": self.digests}
        return json.dumps(document | {"digest": self.digest}).encode()


class PGTransport(CheckpointTransport[Any]):
    """Sends a state's tensors over ``pg``, which must be the manager's own process group.

    Every state is copied before it is sent, so the healthy side continues its step at once; it
    needs that memory until the receiver has the whole state. Every buffer is checked against a
    digest (xxh3; on a device, a sum that is computed there). There is only one source: use
    `HTTPTransport` unless the network of the group is much faster than TCP. Over
    `ProcessGroupBabyGloo` a whole state has to arrive within that group's timeout: after it, its
    process aborts the sends, and with them the connection.

    Args:
        pg: the process group that the manager configures.
        timeout: longest time for one send or receive.
        device: where the group's tensors are.
        state_dict: this worker's own state, or the part that holds all its tensors. If the received
            state has the same tensors at the same places of the tree, they are received in
            place, without memory for a second copy. The weights change during the transfer, and
            are lost if it fails; then the group has to heal again, or restart if no other group
            is left. Only for workers that do not compute meanwhile, which means
            ``use_async_quorum=False``.
    """

    can_defer: ClassVar[bool] = True

    def __init__(
        self,
        pg: ProcessGroup,
        timeout: timedelta = timedelta(seconds=60),
        device: torch.device | str = "cpu",
        state_dict: Callable[[], Any] | None = None,
    ) -> None:
        positive_s("timeout", timeout)
        self._pg = pg
        self._timeout = timeout
        self._device = torch.device(device)
        self._own_state = state_dict
        self._sending: list[tuple[Any, torch.Tensor]] = []  # kept until the operation has ended
        self._sent_at = 0.0  # when one of them began or ended
        self._lock = threading.Lock()  # for these two
        self._lost_source = ""  # why a receive under way was aborted
        self._begun: set[int] = set()  # receivers to which the present state is being sent
        self._progress = (0, 0)  # of the receive under way

    def metadata(self) -> str:
        """A constant: receivers know the rank."""
        return "process group"

    def check_state(self, state: object) -> None:
        check_state(state)

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta
    ) -> None:
        tree, tensors = _describe(state_dict)
        copies = [tensor.to(self._device, copy=True).contiguous() for tensor in tensors]
        digest = "xxh3" if self._device.type == "cpu" else "sum"
        digests = [_DIGESTS[digest](_bytes_of(copy)) for copy in copies]
        encoded = _Description(tree, list(map(_spec_of, tensors)), digests, digest).encode()
        if len(encoded) > MAX_DESCRIPTION_BYTES:
            raise ConfigError("state_dict", f"{len(tensors)} tensors", "too many to be described")
        parts = self._headed(_MAGIC, step, encoded)
        for copy in copies:
            parts += _parts(copy)
        self._begun = set()
        for rank in dst_ranks:
            self._begun.add(rank)
            self._send(parts, rank)
        self._begun = set()

    def send_deferred(
        self,
        dst_ranks: list[int],
        extra_dst_ranks: list[int],
        step: int,
        state_dict: Any,
        timeout: timedelta,
    ) -> None:
        self.send_checkpoint(dst_ranks, step, state_dict, timeout)

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, why: str) -> None:
        """See `CheckpointTransport.refuse_checkpoint`; skips receivers of a part of a state."""
        parts = self._headed(_REFUSAL, step, encode_reason(f"{why}\n"))
        begun, self._begun = self._begun, set()
        for rank in dst_ranks:
            if rank in begun:
                continue  # it would be taken for a part of that state
            try:
                self._send(parts, rank)
            except (TorchFTError, RuntimeError) as error:  # its connection is broken as well
                log.warning(
                    "replica rank %d cannot be informed why it is not healed: %s", rank, error
                )

    def disallow_checkpoint(self) -> None:
        """Release copies that have arrived; the live state is not used after `send_checkpoint`."""
        self._forget_completed()

    @property
    def copied_bytes(self) -> int:
        """Memory held at present for receivers that have not fetched everything."""
        self._forget_completed()
        with self._lock:
            return sum({part.data_ptr(): part.nbytes for _, part in self._sending}.values())

    def last_sent_at(self) -> float | None:
        """See `CheckpointTransport.last_sent_at`.

        Of one operation only its end can be seen: each may take a second for each 100 MB.
        """
        self._forget_completed()
        with self._lock:
            if not self._sending:
                return None
            _, part = self._sending[0]
            return self._sent_at + part.nbytes / _SLOW_BYTES_PER_S

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        source = f"replica rank {src_rank}"
        self._lost_source, self._progress = "", (0, 0)

        def receive(tensor: torch.Tensor) -> torch.Tensor:
            for part in _parts(tensor):
                self._receive_part(part, src_rank, timeout)
                received_bytes, state_bytes = self._progress
                self._progress = min(received_bytes + part.nbytes, state_bytes), state_bytes
            return tensor

        description = self._receive_description(receive, step, source)
        self._progress = 0, description.num_bytes
        own = self._own_tensors(description)
        tensors = own or [
            torch.empty(shape, dtype=dtype, device=self._device)
            for dtype, shape in description.specs
        ]
        try:
            for number, tensor in enumerate(tensors):
                data = _bytes_of(receive(tensor))
                if _DIGESTS[description.digest](data) != description.digests[number]:
                    raise self._damaged(source, f"tensor {number} of {len(tensors)}")
            return decode(description.tree, tensors)
        except (BadTree, TorchFTError) as error:
            if own:
                raise TornState(source, str(error)) from error
            if isinstance(error, TorchFTError):
                raise
            raise CheckpointError(source, f"malformed description: {error}") from error

    def _receive_description(
        self, receive: Callable[[torch.Tensor], torch.Tensor], step: int, source: str
    ) -> _Description:
        """Receive what precedes the tensors.

        Raises:
            CheckpointError: it is damaged, malformed, of another step, or a refusal.
        """
        header = receive(torch.zeros(4, dtype=torch.int64, device=self._device)).tolist()
        kind, sent_step, length, digest = header
        if not 0 <= length <= _LIMITS.get(kind, -1):
            self._check_connection(source)
            raise CheckpointError(source, "what it sent is not the beginning of a state")
        if kind == _MAGIC and sent_step != step:
            raise CheckpointError(source, f"it sent step {sent_step} instead of step {step}")
        body = receive(torch.empty(length, dtype=torch.uint8, device=self._device)).cpu()
        if _xxh3(body) != digest:
            raise self._damaged(source, "the description")
        self._check_connection(source)
        encoded = body.numpy().tobytes()
        if kind == _REFUSAL:
            raise CheckpointError(source, why_not_offered(sent_step, decode_reason(encoded)))
        return _parse(encoded, source)

    def _check_connection(self, source: str) -> None:
        """Check for an error that the group has swallowed: a failed receive looks successful then.

        Raises:
            CheckpointError: the group has failed.
        """
        error = self._pg.errored()
        if error is not None:
            raise CheckpointError(source, f"the process group has failed: {error}") from error

    def _damaged(self, source: str, what: str) -> CheckpointError:
        error = self._pg.errored()
        why = "" if error is None else f": the process group has failed: {error}"
        return CheckpointError(source, f"{what} arrived damaged{why}")

    def recv_deferred(
        self,
        src_rank: int,
        metadata: str,
        extras: Sequence[Callable[[], str]],
        step: int,
        timeout: timedelta,
    ) -> Any:
        return self.recv_checkpoint(src_rank, metadata, step, timeout)

    def interrupt_receive(self, why: str) -> None:
        self.lose_source(why)

    def lose_source(self, why: str) -> None:
        """See `CheckpointTransport.lose_source`; a frozen source does not close its connections.

        Without one member no sum succeeds either, so all connections may be closed.
        """
        if self._pg.errored() is not None:  # else its data may still arrive
            self._lost_source = why
            self._pg.cut()

    def progress(self) -> tuple[int, int]:
        return self._progress

    def shutdown(self, wait: bool = True) -> None:
        """See `CheckpointTransport.shutdown`; operations end with the shutdown of the group."""
        self._sending = []

    def _headed(self, kind: int, step: int, encoded: bytes) -> list[torch.Tensor]:
        """``encoded`` after its header."""
        body = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        header = torch.tensor([kind, step, len(encoded), _xxh3(body)], device=self._device)
        return [header, body.to(self._device)]

    def _send(self, parts: list[torch.Tensor], rank: int) -> None:
        self._forget_completed()
        works: list[Any] = []
        try:
            for part in parts:
                works.append(self._pg.send([part], rank, _TAG))
                with self._lock:
                    self._sending.append((works[-1], part))
                    self._sent_at = time.monotonic()
        finally:
            if self._device.type == "cpu":  # on a device a wait orders the stream only
                _wait_for(works)

    def _forget_completed(self) -> None:
        with self._lock:
            num_before = len(self._sending)
            self._sending = [entry for entry in self._sending if not entry[0].is_completed()]
            if len(self._sending) < num_before:
                self._sent_at = time.monotonic()

    def _receive_part(self, part: torch.Tensor, src_rank: int, timeout: timedelta) -> None:
        limit = min(timeout, self._timeout)
        try:
            work = self._pg.recv([part], src_rank, _TAG)
            is_over = work.wait(limit)
        except TorchFTError:
            raise
        except RuntimeError as error:
            if "timed out" in str(error).lower() or not work.is_completed():
                raise self._too_late(limit, str(error)) from error
            reason = self._lost_source or str(error)
            raise CheckpointError(f"replica rank {src_rank}", reason) from error
        # On a device a wait orders the stream only, and the digest waits for that.
        if not is_over or (self._device.type == "cpu" and not work.is_completed()):
            raise self._too_late(limit, str(self._pg.errored() or ""))

    def _too_late(self, limit: timedelta, reason: str) -> DeadlineExceeded:
        return DeadlineExceeded("receiving a state", limit.total_seconds(), reason)

    def _own_tensors(self, description: _Description) -> list[torch.Tensor]:
        """This worker's tensors, if the described state can be received into them."""
        if self._own_state is None:
            return []
        tree, tensors = _describe(take_apart(self._own_state()))
        places = _match(tensor_places(description.tree), tensor_places(tree))
        if places is None or len(places) != len(description.specs):
            return []
        chosen = [tensors[places[number]] for number in range(len(places))]
        fits = [_spec_of(tensor) for tensor in chosen] == description.specs and all(
            tensor.is_contiguous() and tensor.device.type == self._device.type for tensor in chosen
        )
        return chosen if fits else []


def _match(
    theirs: list[tuple[tuple[str, ...], int]], ours: list[tuple[tuple[str, ...], int]]
) -> dict[int, int] | None:
    """The number of our tensor for each of theirs, if the places in the tree match.

    Our tree may be a part of theirs: then all their paths start with the same extra steps.
    """
    own = dict(ours)
    if not theirs or len(theirs) != len(own):
        return None
    first = theirs[0][0]
    for length in range(len(first) + 1):
        above = first[:length]
        if all(path[:length] == above and path[length:] in own for path, _ in theirs):
            pairs = {(number, own[path[length:]]) for path, number in theirs}
            numbers = dict(pairs)
            # Tied tensors have to be the same on both sides.
            return numbers if len(pairs) == len(numbers) == len(set(numbers.values())) else None
    return None


def _wait_for(works: list[Any]) -> None:
    """Wait once for each send on a thread: gloo notices the end of a send only in ``wait``."""

    def run() -> None:
        while works:
            with contextlib.suppress(RuntimeError):
                works.pop(0).wait(_LONGEST)

    start_uninterruptible(run, "torchft-sent")


def _describe(state: Any) -> tuple[Json, list[torch.Tensor]]:
    """The nesting, and the tensors by number; each is dense, without shared memory."""
    table = TensorTable()
    tree = encode(state, table.number_of)
    return tree, [tensor.detach().resolve_conj().resolve_neg() for tensor in table.tensors]


def _spec_of(tensor: torch.Tensor) -> Spec:
    return tensor.dtype, tuple(tensor.shape)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a view."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.reshape(-1).view(torch.uint8)


def _xxh3(data: torch.Tensor) -> int:
    buffer: Any = data.cpu().numpy()
    return _signed(xxhash.xxh3_64_intdigest(buffer))


def _sum(data: torch.Tensor) -> int:
    """A digest computed on the device of the bytes: the sum of words times position factors."""
    total, words_at = 0, 0
    for part in torch.split(data, _SUM_BYTES):
        padded = torch.nn.functional.pad(part, (0, -len(part) % 8))
        words = padded.clone().view(torch.int64)
        places = torch.arange(words_at, words_at + len(words), device=words.device)
        total += int((words * (places * _FACTOR * 2 + 1)).sum().item())
        words_at += len(words)
    return _signed((total + len(data)) % (1 << 64))


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


_DIGESTS: dict[str, Callable[[torch.Tensor], int]] = {"xxh3": _xxh3, "sum": _sum}


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The bytes of a contiguous tensor in parts that a backend can send."""
    return list(torch.split(_bytes_of(tensor), MAX_PART_BYTES)) if tensor.numel() else []


def _parse(encoded: bytes, source: str) -> _Description:
    try:
        document = json.loads(encoded)
        specs = [_spec(entry) for entry in document["tensors"]]
        size = _num_bytes(specs)
        if size > MAX_STATE_BYTES:
            raise ValueError(f"it claims {size} bytes")
        digests = document["digests"]
        if document["digest"] not in _DIGESTS or len(digests) != len(specs):
            raise ValueError("the digests are missing")
        return _Description(document["tree"], specs, digests, document["digest"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(source, f"malformed description: {error!r}") from error


def _num_bytes(specs: list[Spec]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in specs)


def _spec(entry: Any) -> Spec:
    name, *shape = entry
    if not all(type(size) is int and 0 <= size <= MAX_STATE_BYTES for size in shape):
        raise ValueError("a shape holds something else than sizes")
    if len(shape) > MAX_DIMS:
        raise ValueError(f"a tensor has {len(shape)} dimensions")
    return DTYPES[name], tuple(shape)
