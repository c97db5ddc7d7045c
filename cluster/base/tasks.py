"""Background tasks of one owner: each is referenced until it ends, and a failure is logged, never lost."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)


class BackgroundTasks:
    """Tasks that an owner has started; it waits for them, or cancels them, when it stops."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], *, name: str | None = None) -> "asyncio.Task[None]":
        """Run `work` in the background."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def guarded(self, act: Callable[..., None], *arguments: object) -> None:
        """Call `act`; a failure is logged: the barrier of a task that does several things, one after the other."""
        try:
            act(*arguments)
        except Exception:
            logger.exception("background work of %s failed", self._owner)

    async def wait(self) -> None:
        """Return when all have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("background work of %s failed", self._owner, exc_info=task.exception())
