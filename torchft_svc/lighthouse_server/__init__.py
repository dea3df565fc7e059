"""The lighthouse: one asyncio service that decides which replica groups train together."""

from __future__ import annotations
