"""Decides how two states are compared: one hash over every byte that training can change."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash


def fingerprint(*states: object) -> str:
    """Hash of nested dicts, lists and tensors; equal exactly when names, values and bits are."""
    digest = xxhash.xxh3_128()
    for state in states:
        _add(digest, state)
    return digest.hexdigest()


def _add(digest: xxhash.xxh3_128, value: object) -> None:
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        digest.update(b"mapping of %d" % len(value))
        for key, item in value.items():
            digest.update(repr(key).encode())
            _add(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(b"sequence of %d" % len(value))
        for item in value:
            _add(digest, item)
    else:
        digest.update(repr(value).encode())
