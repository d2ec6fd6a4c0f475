"""`SharedMetrics`: the metrics of all front ends as one: each leaves its numbers in a folder, any of them adds them up.

A front end that has died leaves its last numbers there, so that no counter goes back. No torch.
"""

import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import Metric

from dsv4.engine.stats import EngineStats
from dsv4.http.telemetry.metrics import EngineMetrics, Metrics

_SUFFIX = ".metrics"
_LOG = logging.getLogger("dsv4.serve")


class Sample(msgspec.Struct, array_like=True):
    name: str
    labels: dict[str, str]
    value: float

    @property
    def key(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        return self.name, tuple(sorted(self.labels.items()))


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(dict[str, list[Sample]])  # by the family's name


class SharedMetrics:
    """folder: shared by the front ends of one server; None where there is only this one."""

    def __init__(self, metrics: Metrics, model_name: str, folder: Path | None = None) -> None:
        self._metrics = metrics
        self._model = model_name
        self._folder = folder
        self._own = f"{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
        self._published = b""
        self._is_failing = False

    def publish(self) -> None:
        """Leave this front end's numbers where the others find them."""
        if self._folder is None:
            return
        found = {
            family.name: [Sample(one.name, dict(one.labels), one.value) for one in family.samples]
            for family in self._metrics.registry.collect()
        }
        data = _ENCODER.encode(found)
        if data == self._published:
            return
        half = self._folder / (self._own + ".new")
        try:
            half.write_bytes(data)
            half.replace(self._folder / self._own)
        except FileNotFoundError:
            return  # the server ends, and its folder is gone
        except OSError as error:  # a full disk must not end answers; it is tried again
            if not self._is_failing:
                _LOG.error("other front ends do not see this one's metrics: %s cannot be written: %s", half, error)
            self._is_failing = True
            return
        self._published, self._is_failing = data, False

    def text(self, stats: EngineStats) -> bytes:
        """In Prometheus's format: sums over all front ends, and the engine's own."""
        return generate_latest(_Families([*self._sums(), *EngineMetrics(stats, self._model).collect()]))

    def _sums(self) -> Iterator[Metric]:
        others = [_DECODER.decode(file.read_bytes()) for file in self._others()]
        for family in self._metrics.registry.collect():
            sums = {one.key: one for one in (Sample(o.name, dict(o.labels), o.value) for o in family.samples)}
            for sample in (sample for other in others for sample in other.get(family.name, ())):
                known = sums.get(sample.key)
                if known is None:
                    sums[sample.key] = sample
                elif sample.name.endswith("_created"):
                    known.value = min(known.value, sample.value)
                else:
                    known.value += sample.value
            made = Metric(family.name, family.documentation, family.type)
            for one in sums.values():
                made.add_sample(one.name, one.labels, one.value)
            yield made

    def _others(self) -> list[Path]:
        if self._folder is None:
            return []
        return [file for file in sorted(self._folder.glob(f"*{_SUFFIX}")) if file.name != self._own]


class _Families:
    """What `generate_latest` asks of a registry."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
