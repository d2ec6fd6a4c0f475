"""A hub on loopback: as much of the hub's HTTP as huggingface_hub asks for, with mistakes to order."""

import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40


class Hub:
    """Serves the files of a folder as ORG/NAME. Its mistakes are the fields from `served` on."""

    def __init__(self, folder: Path, name: str = "org/small") -> None:
        self.name = name
        self.files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        self.digests = {file: hashlib.sha256(data).hexdigest() for file, data in self.files.items()}
        self.served: dict[str, bytes] = {}  # other bytes than those announced
        self.listed_sizes: dict[str, int] = {}
        self.gated = False
        self.slow: str | None = None  # this file comes at a crawl
        self.cut: str | None = None  # half of this file comes, then the connection ends
        self.cut_at: int | None = None  # and only the first time, after so many bytes
        self.ranges: list[str] = []  # that were asked for
        self.downloads: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def is_large(self, file: str) -> bool:
        return file.endswith(".safetensors")

    def listing(self) -> dict[str, object]:
        siblings = []
        for file, data in sorted(self.files.items()):
            size = self.listed_sizes.get(file, len(data))
            entry: dict[str, object] = {"rfilename": file, "size": size, "blobId": "b" * 40}
            if self.is_large(file):
                entry["lfs"] = {"sha256": self.digests[file], "size": size, "pointerSize": 134}
            siblings.append(entry)
        about = {"id": self.name, "modelId": self.name, "sha": COMMIT, "private": False, "tags": []}
        return {**about, "siblings": siblings}

    def tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": one["rfilename"], "size": one["size"], "oid": one["blobId"]}
            | ({"lfs": {**one["lfs"], "oid": one["lfs"]["sha256"]}} if "lfs" in one else {})
            for one in self.listing()["siblings"]
        ]

    def _handler(hub):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self._answer(with_body=False)

            def do_GET(self) -> None:
                self._answer(with_body=True)

            def _error(self, status: int, code: str) -> None:
                self.send_response(status)
                self.send_header("X-Error-Code", code)
                self.send_header("X-Error-Message", code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def _json(self, value: object) -> None:
                data = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _answer(self, with_body: bool) -> None:
                path = unquote(urlsplit(self.path).path)
                file = path.rpartition("/")[2]
                if hub.name not in path:
                    self._error(401, "RepoNotFound")
                elif path.startswith("/api/models/"):
                    revision = path.partition("/revision/")[2] or path.partition("/tree/")[2].split("/")[0] or "main"
                    if revision in ("main", COMMIT):
                        self._json(hub.tree() if "/tree/" in path else hub.listing())
                    else:
                        self._error(404, "RevisionNotFound")
                elif hub.gated:
                    self._error(401, "GatedRepo")
                elif file not in hub.files:
                    self._error(404, "EntryNotFound")
                else:
                    self._file(file, with_body)

            def _file(self, file: str, with_body: bool) -> None:
                data = hub.served.get(file, hub.files[file])
                wanted, whole = self.headers.get("Range", ""), len(data)
                self.send_response(206 if wanted else 200)
                if wanted:
                    hub.ranges.append(wanted)
                    first = int(wanted.removeprefix("bytes=").removesuffix("-"))
                    data = data[first:]
                    self.send_header("Content-Range", f"bytes {first}-{whole - 1}/{whole}")
                self.send_header("ETag", f'"{hub.digests[file]}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if with_body:
                    hub.downloads.append(file)
                    if hub.slow == file:
                        self.wfile.write(data[:1000])
                        time.sleep(60)
                    if hub.cut == file:
                        self.wfile.write(data[: len(data) // 2 if hub.cut_at is None else hub.cut_at])
                        hub.cut = file if hub.cut_at is None else None
                        self.close_connection = True
                        return
                    self.wfile.write(data)

        return Handler
