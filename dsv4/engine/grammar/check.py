"""`GrammarChecks`: grammars are tried in processes of their own before an engine compiles them. No torch.

A schema comes from outside, and a small one can ask for gigabytes (a few dozen patterns that must hold together do).
Running out of memory or time ends its process (`check_program.py`), not the server. A caller that is cancelled, since
its client has gone, ends it too.
"""

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections import OrderedDict

from dsv4.engine.grammar import check_program
from dsv4.engine.grammar.errors import GrammarError, first_line

_MOST_SECONDS = 10 * check_program.MAX_CPU_SECONDS
_MOST_AT_ONCE = 4
_NUM_KEPT = 256
_TOO_COMPLEX = "it is too complex to be enforced"


class GrammarChecks:
    """Of one front end. Grammars that were sound lately are not tried again."""

    def __init__(self) -> None:
        self._sound: OrderedDict[str, None] = OrderedDict()
        self._places = asyncio.Semaphore(_MOST_AT_ONCE)

    async def check(self, lark: str) -> None:
        """`GrammarError` if an engine could not enforce it."""
        if lark not in self._sound:
            async with self._places:
                wrong = await _run(lark)
            if wrong:
                raise GrammarError(first_line(wrong))
            self._sound[lark] = None
            if len(self._sound) > _NUM_KEPT:
                self._sound.popitem(last=False)
        self._sound.move_to_end(lark)


async def _run(lark: str) -> str:
    """What is wrong with a grammar; empty if nothing is."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, check_program.__file__, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
    )
    try:
        async with asyncio.timeout(_MOST_SECONDS):
            found, _ = await process.communicate(lark.encode("utf-8"))
    except TimeoutError:
        return _TOO_COMPLEX
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return found.decode("utf-8", errors="replace") if process.returncode == 0 else _TOO_COMPLEX
