"""What the server writes to stderr: one line an event, as text or JSON, and no more of a kind than anybody reads."""

import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

_WINDOW_SECONDS = 10.0
_MOST_IN_WINDOW = 5
_MOST_KINDS = 256


class TextFormatter(logging.Formatter):
    """`2026-11-16 12:00:00 INFO message`"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, and the fields a record carries."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **record.__dict__.get("fields", {}),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


class RepeatFilter(logging.Filter):
    """Lets through a few records of one kind (logger, level and message before its values are filled in) every ten
    seconds; the next one after that says how many were left out. Records with `fields` are one per request and pass."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, int, str], list[float]] = {}  # start of the window, records in it, left out

    def filter(self, record: logging.LogRecord) -> bool:
        if "fields" in record.__dict__:
            return True
        now, kind = self._clock(), (record.name, record.levelno, str(record.msg))
        if kind not in self._seen and len(self._seen) >= _MOST_KINDS:
            self._seen.clear()
        window = self._seen.setdefault(kind, [now, 0, 0])
        if now - window[0] >= _WINDOW_SECONDS:
            if window[2]:
                record.msg, record.args = f"{record.getMessage()} ({window[2]:.0f} more like it before)", ()
            window[:] = [now, 0, 0]
        if window[1] >= _MOST_IN_WINDOW:
            window[2] += 1
            return False
        window[1] += 1
        return True


def log_config(log_format: str, level: str = "INFO") -> dict[str, Any]:
    """The logging of a server's process, as `logging.config.dictConfig` takes it."""
    formatter = JsonFormatter if log_format == "json" else TextFormatter
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"repeats": {"()": RepeatFilter}},
        "formatters": {"line": {"()": formatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "filters": ["repeats"]}},
        "loggers": {
            "dsv4": {"handlers": ["stderr"], "level": level},
            "uvicorn": {"handlers": ["stderr"], "level": max(logging.WARNING, logging.getLevelName(level))},
            "asyncio": {"handlers": ["stderr"], "level": "WARNING"},
        },
    }
