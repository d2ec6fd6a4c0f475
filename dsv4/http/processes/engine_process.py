"""`python -m dsv4.http.processes.engine_process`: the engine of a server; the supervisor starts it."""

import gc
import logging.config
import socket
import sys

from dsv4.dist.errors import RankFailed
from dsv4.http.processes.child import Orders, leave
from dsv4.http.processes.settings import EngineSettings
from dsv4.tools.model_loading import load_llm
from dsv4.tools.option_names import error_text

if __name__ == "__main__":  # before anything slow
    ORDERS = Orders()


def run(orders: Orders, settings: EngineSettings) -> None:
    """Load the model and serve until the supervisor stops it. Raises `RankFailed` if a rank failed."""
    from rich.console import Console

    from dsv4.http.processes.heartbeat import Heartbeat
    from dsv4.http.telemetry.logs import log_config
    from dsv4.tools.receipts.files import RecordFile

    logging.config.dictConfig(log_config(settings.log_format, "INFO"))
    record = settings.record  # opened before the weights are read: a mistake in its name should not cost minutes
    file = None if record is None else RecordFile(record.path, max_bytes=record.max_bytes, num_files=record.num_files)
    llm = load_llm(settings.model, Console(stderr=True))
    if llm.cache.device.type == "cuda":
        from dsv4.tools.selftest.own import check_once

        verdict = check_once(llm, is_ignored=settings.model.ignore_selftest)
        if verdict is not None:
            logging.getLogger("dsv4.engine").info(verdict)

    from dsv4.http.engine_side import engine_loop
    from dsv4.tools.receipts.recorder import Recorder, header_of

    recorder = None
    if file is not None and record is not None:
        recorder = Recorder(file, header_of(llm, hashes_only=record.hashes_only, progress=True))
    loop = engine_loop(llm, max_waiting=settings.max_waiting, recorder=recorder)
    gc.collect()
    gc.freeze()  # the model stays: looking through it again would take a millisecond from some steps
    heartbeat = Heartbeat(settings.room.pulse, lambda: loop.step_start)
    orders.obey(lambda order: loop.stop())
    loop.listen(socket.socket(fileno=settings.listener))
    orders.ready()
    loop.run()
    if recorder is not None:
        recorder.close()
    llm.close()
    heartbeat.stop()
    if loop.failure is not None:
        raise loop.failure


def main() -> None:
    """Bad input ends with one paragraph and status 2, a failed rank with status 1, as every command does."""
    status = 0
    try:
        run(ORDERS, ORDERS.settings(EngineSettings))
    except (ValueError, OSError) as error:
        print(f"dsv4: error: {error_text(error)}", file=sys.stderr)
        status = 2
    except RankFailed as error:
        print(f"dsv4: error: {error}", file=sys.stderr)
        status = 1
    leave(status)


if __name__ == "__main__":
    main()
