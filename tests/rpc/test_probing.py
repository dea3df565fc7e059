"""Tests which lighthouse would accept a client: servers that answer in every way there is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from support.running import grpc_server

from torchft_svc.rpc.probing import accepts_client, accepts_client_blocking
from torchft_svc.rpc.security import PLAIN

LONG_S = 20.0
Code = grpc.StatusCode


@contextlib.contextmanager
def answering(**answers: grpc.StatusCode) -> Iterator[str]:
    """The address of a lighthouse service of these methods, each with its one answer."""

    def handler(code: grpc.StatusCode) -> Any:
        def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
            if code is not Code.OK:
                context.abort(code, "as the test says")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)

    methods = {name: handler(code) for name, code in answers.items()}
    service = grpc.method_handlers_generic_handler("torchft.LighthouseService", methods)
    with grpc_server(service) as address:
        yield address


@pytest.mark.parametrize(
    ("answers", "accepts"),
    [
        ({"HasRoom": Code.OK}, True),
        ({"HasRoom": Code.INVALID_ARGUMENT}, False),  # it has no room
        ({"HasRoom": Code.UNAUTHENTICATED}, False),
        ({"HasRoom": Code.UNAVAILABLE}, False),  # it does not lead
        ({"Quorum": Code.INVALID_ARGUMENT}, True),  # the public release's
        ({"Quorum": Code.UNAVAILABLE}, False),
        ({}, False),  # something else that speaks gRPC, or a proxy with nobody behind it
    ],
)
def test_which_lighthouse_accepts_a_client(
    answers: dict[str, grpc.StatusCode], accepts: bool
) -> None:
    with answering(**answers) as address:
        assert accepts_client_blocking(address, "job", PLAIN, LONG_S) is accepts
        assert asyncio.run(accepts_client(address, "job", PLAIN, LONG_S)) is accepts
