"""`python -m dsv4.rank`: one rank besides the first, which starts it (dsv4/dist/world.py); settings on stdin.

The end of stdin is the end of the first rank, at whatever moment it comes, and of this process.
"""

import json
import os
import signal
import sys
import threading


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all ranks; the first one ends the others
    settings = json.loads(_first_line())
    threading.Thread(target=_end_with_stdin, daemon=True).start()

    import torch  # after the signal: it takes a second

    from dsv4.config import EngineConfig
    from dsv4.dist.errors import PeerLost
    from dsv4.llm import LLM

    torch.set_num_threads(settings.pop("num_threads"))
    dtype, engine = settings.pop("dtype"), settings.pop("engine")
    try:
        LLM(**settings, dtype=getattr(torch, dtype), engine=EngineConfig(**engine))
    except PeerLost:
        sys.exit(1)  # another rank is to blame, and is named by the first one


def _first_line() -> bytes:
    """Unbuffered: the thread that waits for the end reads the same file."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            sys.exit("dsv4: a rank is started by rank 0, with its settings on stdin")
        line += piece
    return line


def _end_with_stdin() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
