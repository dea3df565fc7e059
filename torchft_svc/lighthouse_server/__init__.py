"""The lighthouse: one asyncio service that decides which replica groups train together."""

from __future__ import annotations

from torchft_svc.env import keep_grpc_in_one_thread

keep_grpc_in_one_thread()  # here, because it counts only before the first import of gRPC
