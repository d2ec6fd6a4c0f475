"""A rank besides the first: its engine, served to rank 0 as any engine is to its clients (engine/link/loop.py)."""

import socket

from dsv4.dist.control import Progress
from dsv4.dist.follower import Follower
from dsv4.engine.control import EngineControl
from dsv4.engine.engine import Engine
from dsv4.engine.link.grammars import Constrain
from dsv4.engine.link.loop import EngineLoop
from dsv4.engine.link.messages import EngineInfo
from dsv4.engine.ranks.own import LoadReport

_MAX_WAITING = 1 << 30  # rank 0 bounds them


def serve_rank(
    engine: Engine, control: EngineControl, info: EngineInfo, connection: socket.socket, link: Follower,
    progress: Progress, *, constrain: Constrain | None = None,
) -> None:  # fmt: skip
    """Until rank 0 ends it. `RankFailed` if something else does."""
    loop = EngineLoop(
        engine, info, control, max_waiting=_MAX_WAITING, constrain=constrain,
        load=LoadReport(engine, progress.turn).news, answers={"check_integrity": engine.check_integrity},
    )  # fmt: skip
    loop.attach(connection)
    link.when_stopped(loop.stop)
    loop.run()
    if loop.failure is not None and not link.is_stopped:
        raise loop.failure
