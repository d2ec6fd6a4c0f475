"""`CompileWatch`: which kernels Triton specialises, and when."""

from __future__ import annotations

import importlib
import threading
from typing import Any, ClassVar


class CompileWatch:
    """Names of the kernels Triton specialises while the watch is on, by whatever thread. Does nothing where there is no
    Triton."""

    _watching: ClassVar[list[CompileWatch]] = []
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _before: ClassVar[Any] = None

    def __init__(self) -> None:
        self.names: list[str] = []
        try:
            self._knobs: Any = importlib.import_module("triton").knobs.runtime
        except ImportError:
            self._knobs = None

    def __enter__(self) -> None:
        if self._knobs is None:
            return
        with self._lock:
            if not self._watching:
                CompileWatch._before = self._knobs.jit_post_compile_hook
                self._knobs.jit_post_compile_hook = self._note
            self._watching.append(self)

    def __exit__(self, *error: object) -> None:
        if self._knobs is None:
            return
        with self._lock:
            self._watching.remove(self)
            if not self._watching:
                self._knobs.jit_post_compile_hook = self._before

    @classmethod
    def _note(cls, *, key: str, **facts: Any) -> None:
        for watch in tuple(cls._watching):
            watch.names.append(str(facts.get("repr", key)).split("[", 1)[0])
        if cls._before is not None:
            cls._before(key=key, **facts)
