"""`python -m dsv4.http.processes.front_end`: one of a server's front ends; the supervisor starts it. No torch."""

import gc
import socket
from pathlib import Path

from dsv4.http.processes.child import Orders, leave
from dsv4.http.processes.settings import FrontEndSettings

if __name__ == "__main__":  # before anything slow
    ORDERS = Orders()


def run(orders: Orders, settings: FrontEndSettings) -> int:
    """Serve until the supervisor stops it; returns the exit status."""
    from dsv4.http.engine_connection import EngineConnection
    from dsv4.http.lifecycle import make_uvicorn
    from dsv4.http.processes.heartbeat import PulseReader, PulseWriter
    from dsv4.http.server import create_app
    from dsv4.text.tokenizer import Tokenizer

    room = settings.room
    tokenizer = Tokenizer.from_pretrained(Path(settings.tokenizer))
    engine = EngineConnection(lambda: room.socket, pulse=PulseReader(room.pulse))
    app = create_app(engine, tokenizer, settings.server, folder=room.path)

    def on_start() -> None:
        gc.collect()
        gc.freeze()  # modules and tokenizer stay: no collection need look through them again
        orders.ready()

    beat = PulseWriter(Path(settings.pulse)).beat
    server = make_uvicorn(app, settings.server, on_start=on_start, on_tick=beat)
    orders.obey(lambda order: server.stop())
    server.run(sockets=[socket.socket(fileno=settings.listener)])
    return 0 if server.started else 1


def main() -> None:
    leave(run(ORDERS, ORDERS.settings(FrontEndSettings)))


if __name__ == "__main__":
    main()
