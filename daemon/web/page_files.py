"""The page's files, served from memory with digests as ETags.

All files are read once, so no path of a request ever reaches the disk.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
from collections.abc import Mapping
from pathlib import Path

from attrs import frozen
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

STATIC = Path(__file__).with_name("static")
INDEX = "index.html"
GZIP_BYTES_MIN = 1_024  # shorter files do not become smaller
MEDIA_TYPES = {  # not looked up, because systems differ
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


@frozen
class _File:
    body: bytes
    zipped: bytes  # empty if compression is not worth it
    media_type: str
    tag: str


class PageFiles:
    """The files of one folder, by their paths in it; read at the first request."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @functools.cached_property
    def files(self) -> Mapping[str, _File]:
        return {
            str(path.relative_to(self._folder)): _read(path)
            for path in sorted(self._folder.rglob("*"))
            if path.is_file()
        }

    def routes(self) -> list[Route]:
        return [Route("/", self._index), Route("/static/{name:path}", self._file)]

    async def _index(self, request: Request) -> Response:
        return _answer(request, self.files.get(INDEX))

    async def _file(self, request: Request) -> Response:
        return _answer(request, self.files.get(request.path_params["name"]))


PAGES = PageFiles(STATIC)


def _read(path: Path) -> _File:
    body = path.read_bytes()
    media_type = MEDIA_TYPES.get(path.suffix)
    return _File(
        body,
        gzip.compress(body, mtime=0) if media_type and len(body) >= GZIP_BYTES_MIN else b"",
        media_type or "application/octet-stream",
        f'"{hashlib.blake2b(body, digest_size=16).hexdigest()}"',
    )


def _answer(request: Request, file: _File | None) -> Response:
    if file is None:
        return Response("no such file", 404, media_type="text/plain")
    # Checked at every load (mostly a 304), so that a page never mixes two versions.
    headers = {"ETag": file.tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(None, 304, headers)
    if file.zipped and "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        return Response(file.zipped, 200, headers, file.media_type)
    return Response(file.body, 200, headers, file.media_type)
