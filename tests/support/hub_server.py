"""A hub on this machine: the few answers that the hub library asks for, over HTTP."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class HubServer:
    """Repositories by id, each a list of commits (the last is main's): a commit's name and its folder."""

    def __init__(self) -> None:
        self.commits: dict[str, list[tuple[str, Path]]] = {}
        self.num_reads: Counter[str] = Counter()
        """GETs of files, by name."""
        self.url = ""

    def find(self, repository: str, revision: str) -> tuple[str, Path] | None:
        """Return a commit and its folder."""
        commits = self.commits.get(repository, [])
        if revision == "main":
            return commits[-1] if commits else None
        return next((commit for commit in commits if commit[0] == revision), None)


def _make_handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self._describe("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main", parts[4:5])
            elif len(parts) >= 5 and parts[2] == "resolve":
                self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), with_body=with_body)
            else:
                self._send(404, b"{}", {})

        def _describe(self, repository: str, revision: str, kind: list[str]) -> None:
            found = hub.find(repository, revision)
            if found is None:
                code = "RevisionNotFound" if repository in hub.commits else "RepoNotFound"
                self._send(404, b'{"error": "not found"}', {"X-Error-Code": code})
                return
            commit, folder = found
            names = sorted(path.name for path in folder.iterdir())
            if kind == ["tree"]:
                entries = [
                    {"type": "file", "path": name, "size": (folder / name).stat().st_size, "oid": _etag(folder / name)}
                    for name in names
                ]
                self._send(200, json.dumps(entries).encode(), {"X-Repo-Commit": commit})
                return
            body = {"id": repository, "sha": commit, "siblings": [{"rfilename": name} for name in names]}
            self._send(200, json.dumps(body).encode(), {"X-Repo-Commit": commit})

        def _file(self, repository: str, revision: str, name: str, *, with_body: bool) -> None:
            found = hub.find(repository, revision)
            if found is None or not (found[1] / name).is_file():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            commit, folder = found
            if with_body:
                hub.num_reads[name] += 1
            headers = {"ETag": f'"{_etag(folder / name)}"', "X-Repo-Commit": commit}
            self._send(200, (folder / name).read_bytes(), headers, with_body=with_body)

        def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool = True) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body and self.command == "GET":
                self.wfile.write(body)

    return Handler


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()


@contextmanager
def running_hub() -> Iterator[HubServer]:
    """A hub on a free port."""
    hub = HubServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _make_handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
