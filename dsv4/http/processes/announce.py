"""What a server tells whoever started it: systemd (`Type=notify`), and a container's health check. No torch."""

import os
import socket
from contextlib import suppress
from pathlib import Path

ADDRESS_FILE = "DSV4_ADDRESS_FILE"  # the environment's name of the file that gets the server's address


def announce_ready(url: str) -> None:
    if os.environ.get(ADDRESS_FILE):
        Path(os.environ[ADDRESS_FILE]).write_text(url, encoding="utf-8")
    _notify("READY=1")


def announce_end(seconds: float) -> None:
    """Tell systemd that the server stops, and that this may take `seconds`."""
    _notify(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")


def _notify(text: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.sendto(text.encode(), "\0" + address[1:] if address[0] == "@" else address)
