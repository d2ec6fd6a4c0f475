"""Where a server listens. No web framework: the process that starts the others uses it."""

import errno
import socket

from dsv4.config import ConfigError
from dsv4.http.settings import ServerConfig


def take_address(config: ServerConfig) -> socket.socket:
    """A socket bound to the server's address, not yet listening. `ConfigError` if the address cannot be had.

    Clients cannot connect before the server listens. Binding alone neither keeps another process from listening there
    nor notices one that does, so the address is tried first.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"host {config.host!r} is not an address of this machine: {error}") from None
    try:
        if config.port != 0:
            with _bound(family, kind, protocol, address) as trial:
                trial.listen(1)
        return _bound(family, kind, protocol, address)
    except OSError as error:
        place = f"{config.host} port {config.port}"
        if error.errno == errno.EADDRINUSE:
            message = f"{place} is in use: stop what listens there, or choose another with --port (0 takes a free one)"
            raise ConfigError(message) from None
        if error.errno == errno.EACCES:
            raise ConfigError(f"{place}: this user may not listen there; choose a --port above 1023") from None
        raise ConfigError(f"{place} cannot be listened on: {error.strerror}; choose another --host") from None


def _bound(family: int, kind: int, protocol: int, address: object) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)  # type: ignore[arg-type]
    except OSError:
        made.close()
        raise
    return made


def address_url(config: ServerConfig, listener: socket.socket) -> str:
    """Where a browser finds the server."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{'http' if config.tls is None else 'https'}://{host}:{listener.getsockname()[1]}"
