"""Heals over a process group's send and recv: from device to device where the group can do that."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from torchft_svc.client.checkpointing.reasons import (
    MAX_REASON_BYTES,
    decode_reason,
    encode_reason,
    why_not_offered,
)
from torchft_svc.client.checkpointing.serialization import (
    MAX_DESCRIPTION_BYTES,
    MAX_STATE_BYTES,
)
from torchft_svc.client.checkpointing.tensors import MAX_DIMS
from torchft_svc.client.checkpointing.transport import CheckpointTransport
from torchft_svc.client.checkpointing.tree import DTYPES, BadTree, Json, decode, encode
from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.client.shards import take_apart
from torchft_svc.client.strays import start_stray
from torchft_svc.core.durations import check_length
from torchft_svc.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    TorchFTError,
    TornState,
)

log = logging.getLogger(__name__)

# What begins a state: this, the step, and the length of the description.
_MAGIC = 0x746F7263686674
# What comes in place of a state: this, the step, and the length of the reason.
_REFUSAL = 0x746F7263686E6F
# The longest that may follow.
_LIMITS = {_MAGIC: MAX_DESCRIPTION_BYTES, _REFUSAL: MAX_REASON_BYTES}
# One operation moves at most this much: backends count bytes in 32 bits here and there.
MAX_PART_BYTES = 1 << 30
# Nobody waits for a send, and gloo closes the connection if it is not over by then: who does not
# receive leaves the group with the next quorum, or sooner.
_LONGEST = timedelta(hours=1)
# Other sends and receives of a program keep to small tags.
_TAG = 0x70670000


@dataclass(frozen=True, slots=True)
class _Description:
    """The nesting, and dtype and shape of each tensor."""

    tree: Json
    specs: list[tuple[torch.dtype, tuple[int, ...]]]

    def encode(self) -> bytes:
        tensors = [[str(dtype).removeprefix("torch."), *shape] for dtype, shape in self.specs]
        return json.dumps({"tree": self.tree, "tensors": tensors}).encode()


class PGTransport(CheckpointTransport[Any]):
    """Sends a state's tensors over ``pg``, which must be the manager's own process group.

    Every state is copied before it is sent, so the healthy side goes on with its step at once; it
    needs that memory until the receiver has everything. There are no checksums, and no second
    source: use `HTTPTransport` unless the network of the group is much faster than TCP. Over
    `ProcessGroupBabyGloo` a whole state has to arrive within that group's timeout: its process
    gives up what nobody takes for so long, and the connection with it.

    Args:
        pg: the process group that the manager configures.
        timeout: longest time for one of its operations.
        device: where the group's tensors are.
        state_dict: this worker's own state. If what is received has the same layout, it is
            received in place, without memory for a second copy. The weights change while it
            arrives, and are lost if it does not arrive completely; then the group can only heal
            again, or restart if no other is left. For a worker that computes nothing meanwhile,
            which means ``use_async_quorum=False``.
    """

    def __init__(
        self,
        pg: ProcessGroup,
        timeout: timedelta = timedelta(seconds=60),
        device: torch.device | str = "cpu",
        state_dict: Callable[[], Any] | None = None,
    ) -> None:
        if timeout <= timedelta(0):
            raise ConfigError("timeout", str(timeout), "it must be positive")
        check_length("timeout", timeout.total_seconds())
        self._pg = pg
        self._timeout = timeout
        self._device = torch.device(device)
        self._own_state = state_dict
        self._sending: list[tuple[Any, torch.Tensor]] = []  # kept until the operation is over
        self._lock = threading.Lock()  # for that list alone
        self._begun: set[int] = set()  # to whom the state goes that is being handed over

    def metadata(self) -> str:
        """Nothing: receivers know the rank."""
        return "process group"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta
    ) -> None:
        """See `CheckpointTransport.send_checkpoint`."""
        description, tensors = _describe(state_dict)
        encoded = description.encode()
        if len(encoded) > MAX_DESCRIPTION_BYTES:
            raise ConfigError("state_dict", f"{len(tensors)} tensors", "too many to be described")
        parts = self._headed(_MAGIC, step, encoded)
        for tensor in tensors:
            parts += _parts(tensor.to(self._device, copy=True).contiguous())
        self._begun = set()
        for rank in dst_ranks:
            self._begun.add(rank)
            self._send(parts, rank)
        self._begun = set()

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, why: str) -> None:
        """See `CheckpointTransport.refuse_checkpoint`; nothing to who has got a part of a state."""
        parts = self._headed(_REFUSAL, step, encode_reason(f"{why}\n"))
        begun, self._begun = self._begun, set()
        for rank in dst_ranks:
            if rank in begun:
                continue  # in the middle of a state it would be taken for a part of it
            try:
                self._send(parts, rank)
            except (TorchFTError, RuntimeError) as error:  # then its connection is broken, too
                log.warning("replica rank %d cannot be told why it is not healed: %s", rank, error)

    def disallow_checkpoint(self) -> None:
        """Let go of what has arrived; what is sent was copied."""
        self._forget_completed()

    @property
    def copied_bytes(self) -> int:
        """Memory held at present for receivers that have not fetched everything."""
        self._forget_completed()
        with self._lock:
            return sum({part.data_ptr(): part.nbytes for _, part in self._sending}.values())

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """See `CheckpointTransport.recv_checkpoint`."""
        source = f"replica rank {src_rank}"

        def receive(tensor: torch.Tensor) -> torch.Tensor:
            for part in _parts(tensor):
                self._receive_part(part, src_rank, timeout)
            return tensor

        header = receive(torch.zeros(3, dtype=torch.int64, device=self._device)).tolist()
        kind, sent_step, length = header
        if not 0 <= length <= _LIMITS.get(kind, -1):
            raise CheckpointError(source, "what it sent is not the beginning of a state")
        if kind == _MAGIC and sent_step != step:
            raise CheckpointError(source, f"it sent step {sent_step} instead of step {step}")
        body = receive(torch.empty(length, dtype=torch.uint8, device=self._device))
        encoded = body.cpu().numpy().tobytes()
        if kind == _REFUSAL:
            raise CheckpointError(source, why_not_offered(sent_step, decode_reason(encoded)))
        description = _parse(encoded, source)
        own = self._own_tensors(description)
        tensors = own or [
            torch.empty(shape, dtype=dtype, device=self._device)
            for dtype, shape in description.specs
        ]
        try:
            for tensor in tensors:
                receive(tensor)
            return decode(description.tree, tensors)
        except (BadTree, TorchFTError) as error:
            if own:
                raise TornState(source, str(error)) from error
            if isinstance(error, TorchFTError):
                raise
            raise CheckpointError(source, f"malformed description: {error}") from error

    def shutdown(self, wait: bool = True) -> None:
        """See `CheckpointTransport.shutdown`; the group's own end ends what is under way."""
        self._sending = []

    def _headed(self, kind: int, step: int, encoded: bytes) -> list[torch.Tensor]:
        """``encoded``, behind a header that says what it is."""
        header = torch.tensor([kind, step, len(encoded)], device=self._device)
        body = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(self._device)
        return [header, body]

    def _send(self, parts: list[torch.Tensor], rank: int) -> None:
        self._forget_completed()
        works: list[Any] = []
        try:
            for part in parts:
                works.append(self._pg.send([part], rank, _TAG))
                with self._lock:
                    self._sending.append((works[-1], part))
        finally:
            if self._device.type == "cpu":  # elsewhere a wait is for the stream
                _wait_for(works)

    def _forget_completed(self) -> None:
        with self._lock:
            self._sending = [entry for entry in self._sending if not entry[0].is_completed()]

    def _receive_part(self, part: torch.Tensor, src_rank: int, timeout: timedelta) -> None:
        try:
            work = self._pg.recv([part], src_rank, _TAG)
            work.wait(min(timeout, self._timeout))
        except TorchFTError:
            raise
        except RuntimeError as error:
            if "timed out" in str(error).lower() or not work.is_completed():
                limit_s = min(timeout, self._timeout).total_seconds()
                raise DeadlineExceeded("receiving a state", limit_s, str(error)) from error
            raise CheckpointError(f"replica rank {src_rank}", str(error)) from error

    def _own_tensors(self, description: _Description) -> list[torch.Tensor]:
        """Those of this worker, if what is described can be received into them."""
        if self._own_state is None:
            return []
        own, tensors = _describe(take_apart(self._own_state()))
        fits = own.specs == description.specs and all(
            tensor.is_contiguous() and tensor.device.type == self._device.type for tensor in tensors
        )
        return tensors if fits else []


def _wait_for(works: list[Any]) -> None:
    """Let gloo note the end of sends, which it does only for who waits: once for each."""

    def run() -> None:
        while works:
            with contextlib.suppress(RuntimeError):
                works.pop(0).wait(_LONGEST)

    start_stray(run, "torchft-sent")


def _describe(state: Any) -> tuple[_Description, list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []
    numbers: dict[int, int] = {}

    def take(tensor: torch.Tensor, path: str) -> int:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise ConfigError(path, str(tensor.layout), "only dense tensors with data can be sent")
        number = numbers.setdefault(id(tensor), len(tensors))
        if number == len(tensors):
            tensors.append(tensor.detach())
        return number

    tree = encode(state, take)
    return _Description(tree, [(t.dtype, tuple(t.shape)) for t in tensors]), tensors


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The bytes of a contiguous tensor in pieces that a backend can carry."""
    if not tensor.numel():
        return []
    return list(torch.split(tensor.reshape(-1).view(torch.uint8), MAX_PART_BYTES))


def _parse(encoded: bytes, source: str) -> _Description:
    try:
        document = json.loads(encoded)
        specs = [_spec(entry) for entry in document["tensors"]]
        size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in specs)
        if size > MAX_STATE_BYTES:
            raise ValueError(f"it claims {size} bytes")
        return _Description(document["tree"], specs)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(source, f"malformed description: {error!r}") from error


def _spec(entry: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    name, *shape = entry
    if not all(type(size) is int and 0 <= size <= MAX_STATE_BYTES for size in shape):
        raise ValueError("a shape holds something else than sizes")
    if len(shape) > MAX_DIMS:
        raise ValueError(f"a tensor has {len(shape)} dimensions")
    return DTYPES[name], tuple(shape)
