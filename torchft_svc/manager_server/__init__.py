"""The manager: the asyncio service that speaks for one replica group."""
