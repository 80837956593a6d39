"""The chat page: files of this package, served as they are, with headers that let it load nothing from elsewhere.

The page itself holds no secret and needs no token; what it asks of the gateway does. Its text is inserted as text, and
browsers that know trusted types refuse anything else.
"""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter, Response

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""No inline script or style, nothing from another origin, no frame around it."""

HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def _read() -> dict[str, tuple[bytes, str]]:
    folder = resources.files("private_llm_gateway") / "page"
    ending = {file.name: file.name[file.name.rfind(".") :] for file in folder.iterdir()}
    return {name: ((folder / name).read_bytes(), _TYPES[end]) for name, end in ending.items() if end in _TYPES}


_FILES = _read()
page_router = APIRouter(include_in_schema=False)
"""`/` and `/page/...`, without a token."""


@page_router.get("/")
def index() -> Response:
    """The page."""
    return file("index.html")


@page_router.get("/page/{name}")
def file(name: str) -> Response:
    """What the page loads; 404 for anything else."""
    found = _FILES.get(name)
    if found is None:
        return Response("no such file", 404, HEADERS, "text/plain; charset=utf-8")
    return Response(found[0], 200, HEADERS, found[1])
