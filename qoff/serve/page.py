"""The page at `/`: a chat, and what the engine is doing. One file, which fetches nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from fastapi.responses import HTMLResponse

PAGE = Path(__file__).with_name("page.html")


@cache
def page() -> HTMLResponse:
    """The page. Browsers run no script and apply no style but its own, and ask this server only."""
    text = PAGE.read_text(encoding="utf-8")
    policy = [
        "default-src 'none'",
        f"script-src {_hash(text, 'script')}",
        f"style-src {_hash(text, 'style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return HTMLResponse(
        text,
        headers={
            "Content-Security-Policy": "; ".join(policy),
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        },
    )


def _hash(text: str, tag: str) -> str:
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
