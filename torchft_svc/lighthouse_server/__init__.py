"""The lighthouse: one asyncio service that decides which replica groups train together."""
