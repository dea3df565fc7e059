"""Tests whose turn it is to be written: memory has a bound, and no job waits for another's deaf."""

from __future__ import annotations

import asyncio

from torchft_svc.rpc.heavy_writes import HEAVY_BYTES, HeavyWrites


class Scene:
    """Streams of several jobs that have 10 bytes of room; each writes 4."""

    def __init__(self) -> None:
        self.writes = HeavyWrites(10)
        self.writing: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def begin_writes(self, *names: str) -> None:
        """The first letter of a name is its job."""
        for name in names:
            self._tasks[name] = asyncio.create_task(self._begin_write(name))
        await self._run_tasks()

    async def _begin_write(self, name: str) -> None:
        await self.writes.begin_write(name[0], 4)
        self.writing.append(name)

    async def end_write(self, name: str) -> None:
        self.writing.remove(name)
        self.writes.end_write(name[0], 4)
        await self._run_tasks()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await self._run_tasks()

    async def _run_tasks(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


def test_as_many_at_a_time_as_there_is_room_for_in_the_order_of_their_coming() -> None:
    async def story() -> None:
        scene = Scene()
        await scene.begin_writes("a1", "a2", "a3", "a4", "a5")
        assert scene.writing == ["a1", "a2"]
        await scene.end_write("a1")
        assert scene.writing == ["a2", "a3"]
        await scene.end_write("a3")
        await scene.end_write("a2")
        assert scene.writing == ["a4", "a5"]

    asyncio.run(story())


def test_a_job_of_which_nothing_is_under_way_may_always_begin() -> None:
    async def story() -> None:
        scene = Scene()
        await scene.begin_writes("a1", "a2", "a3", "b1", "b2")
        assert scene.writing == ["a1", "a2", "b1"]
        await scene.end_write("b1")  # those of a hold all that there is, and do not move
        assert scene.writing == ["a1", "a2", "b2"]
        await scene.begin_writes("c1")
        assert scene.writing == ["a1", "a2", "b2", "c1"]

    asyncio.run(story())


def test_jobs_take_turns() -> None:
    async def story() -> None:
        scene = Scene()
        await scene.begin_writes("a1", "b1", "a2", "a3", "b2", "b3")
        assert scene.writing == ["a1", "b1"]
        await scene.end_write("a1")
        await scene.end_write("b1")
        assert sorted(scene.writing) == ["a2", "b2"]

    asyncio.run(story())


def test_who_gives_up_gives_its_room_back() -> None:
    async def story() -> None:
        scene = Scene()
        await scene.begin_writes("a1", "a2", "a3", "a4")
        await scene.cancel("a3")
        scene.writing.remove("a1")
        scene.writes.end_write("a", 4)  # it is the turn of a4, which gives up before it is resumed
        scene._tasks["a4"].cancel()
        await scene.end_write("a2")
        assert scene.writing == []
        await scene.begin_writes("b1", "b2", "b3")
        assert scene.writing == ["b1", "b2"]

    asyncio.run(story())


class _Call:
    """A unary call; `done` is what gRPC calls when its answer has left."""

    def add_done_callback(self, callback: object) -> None:
        self.done = callback


def test_an_answer_has_its_turn_until_it_has_left() -> None:
    async def story() -> None:
        writes = HeavyWrites(HEAVY_BYTES)
        calls = [_Call(), _Call()]
        answer = bytes(HEAVY_BYTES)
        tasks = [
            asyncio.create_task(writes.answer("a", answer, call))  # type: ignore[arg-type]
            for call in calls
        ]
        await asyncio.wait(tasks, timeout=0.1)
        assert [task.done() for task in tasks] == [True, False]
        calls[0].done(None)  # type: ignore[operator]
        assert await asyncio.wait_for(tasks[1], 10) is answer
        assert await writes.answer("a", b"short", calls[0]) == b"short"  # type: ignore[arg-type]

    asyncio.run(story())
