"""Serves the dashboard's files, which are read once."""

from __future__ import annotations

import hashlib
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = "torchft_svc.lighthouse_server.http.page"
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


def page_routes() -> list[Route]:
    """The paths of the page."""
    folder = resources.files(_FOLDER)
    return [
        _route(path, (folder / name).read_bytes(), media_type)
        for path, (name, media_type) in _FILES.items()
    ]


def _route(path: str, content: bytes, media_type: str) -> Route:
    # Asked for each time, so that a new version is seen; answered in a few bytes if it is the same.
    tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    headers = {"etag": tag, "cache-control": "no-cache"}

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return Route(path, answer)
