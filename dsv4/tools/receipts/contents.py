"""`Contents`: what some files of a record hold that can be run again. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsv4.tools.receipts.files import read_record
from dsv4.tools.receipts.lines import Gap, Header, Receipt, RecordError, with_content

_Asked = tuple[str | None, ...]


@dataclass
class Contents:
    """Read once for its headers and numbers, and again, line by line, while its requests run.

    sources  requests of other files, for receipts that have hashes only
    """

    paths: Sequence[Path]
    sources: dict[_Asked, Receipt]
    headers: list[Header] = field(default_factory=list)
    num_requests: int = 0
    num_without_content: int = 0
    num_lost: int = 0
    damaged: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, paths: Sequence[Path], sources: Sequence[Path] = ()) -> Contents:
        """`RecordError` or `OSError` where there is nothing to run."""
        others = (entry for _, _, entry in read_record(sources))
        known = {one.asked: one for one in others if isinstance(one, Receipt) and one.has_content and not one.changed}
        found = cls(paths, known)
        for _, header, entry in read_record(paths, found._note):
            if not found.headers or header is not found.headers[-1]:
                found.headers.append(header)
            if isinstance(entry, Gap):
                found.num_lost += entry.num_lost
            elif found._complete(entry) is not None:
                found.num_requests += 1
            else:
                found.num_without_content += 1
        if not found.num_requests:
            why = "no request in it"
            if found.num_without_content:
                why = "hashes only, which cannot be run: a record of the same requests has what they were (--content)"
            raise RecordError(f"{', '.join(map(str, paths))}: {why}")
        return found

    def requests(self, limit: int | None = None) -> Iterator[tuple[str, Header, Receipt]]:
        """File, header and receipt of every request that can be run, in order."""
        left = self.num_requests if limit is None else min(limit, self.num_requests)
        for path, header, entry in read_record(self.paths):
            if left == 0:
                return
            receipt = self._complete(entry) if isinstance(entry, Receipt) else None
            if receipt is not None:
                left -= 1
                yield str(path), header, receipt

    def _complete(self, receipt: Receipt) -> Receipt | None:
        if receipt.has_content:
            return receipt
        source = self.sources.get(receipt.asked)
        return None if source is None else with_content(receipt, source)

    def _note(self, path: Path, number: int, why: str) -> None:
        self.damaged.append(f"{path}:{number}: {why}")
