"""A model hub on 127.0.0.1 with what huggingface_hub asks of the real one, and a cache as it
leaves it."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def commit_of(revision: str) -> str:
    """40 hex digits that stand for a revision's commit."""
    return hashlib.sha1(revision.encode()).hexdigest()


@dataclass
class Repository:
    """Folders by revision; `gated` makes every request a refusal."""

    revisions: dict[str, Path]
    gated: bool = False

    def folder(self, revision: str) -> Path | None:
        by_commit = {commit_of(name): folder for name, folder in self.revisions.items()}
        return self.revisions.get(revision) or by_commit.get(revision)

    def commit(self, revision: str) -> str:
        return commit_of(revision) if revision in self.revisions else revision


@dataclass
class Hub:
    """Repositories by id, and the paths of files that were fetched, in order."""

    repositories: dict[str, Repository]
    fetched: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def serving(repositories: dict[str, Repository]) -> Iterator[Hub]:
    """A hub that runs until the block ends."""
    hub = Hub(repositories)

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def fill_cache(cache: Path, repository: str, revisions: dict[str, Path]) -> None:
    """Write the folders of revisions as the hub's own cache holds them: blobs and links."""
    home = cache / ("models--" + repository.replace("/", "--"))
    (home / "refs").mkdir(parents=True)
    (home / "blobs").mkdir()
    for revision, folder in revisions.items():
        commit = commit_of(revision)
        (home / "refs" / revision).write_text(commit, encoding="utf-8")
        snapshot = home / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for file in folder.iterdir():
            data = file.read_bytes()
            blob = home / "blobs" / hashlib.sha256(data).hexdigest()
            blob.write_bytes(data)
            (snapshot / file.name).symlink_to(blob)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests read `fetched`."""

    def _answer(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        api = parts[:2] == ["api", "models"]
        if api:
            parts = parts[2:]
        name, kind, revision, rest = "/".join(parts[:2]), parts[2], parts[3], parts[4:]
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self._refuse(404, "RepoNotFound")
        if repository.gated:
            return self._refuse(403, "GatedRepo")
        folder = repository.folder(revision)
        if folder is None:
            return self._refuse(404, "RevisionNotFound")
        commit = repository.commit(revision)
        if not api:
            return self._file(folder / "/".join(rest), commit)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in files]
        if kind == "revision":
            siblings = [{"rfilename": file} for file in names]
            return self._json({"id": name, "sha": commit, "siblings": siblings})
        entries = [
            {"type": "file", "path": file, "size": path.stat().st_size, "oid": _digest(path)}
            for file, path in zip(names, files, strict=True)
        ]
        return self._json(entries)

    def _file(self, path: Path, commit: str) -> None:
        if not path.is_file():
            return self._refuse(404, "EntryNotFound")
        if self.command == "GET":
            self.hub.fetched.append(path.name)
        headers = {"ETag": f'"{_digest(path)}"', "X-Repo-Commit": commit}
        return self._send(200, path.read_bytes(), headers)

    def _json(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self._send(200, data, {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
