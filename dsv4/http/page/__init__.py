"""The chat page: its parts put into one document, and the headers that let nothing else run."""

import base64
import hashlib
import re
from functools import cache
from importlib import resources

_STYLE = "page.css"
_LIBRARY = "temml/temml.min.js"
# in this order: one script, one scope
_SCRIPTS = ("math.js", "code.js", "markdown.js", "store.js", "live.js", "answer.js", "chat.js")


@cache
def page_text() -> str:
    """One document, nothing loaded from elsewhere."""
    folder = resources.files(__name__)

    def read(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    script = '"use strict";\n' + "\n".join(read(name) for name in _SCRIPTS)
    parts = {
        "<style></style>": f"<style>\n{read(_STYLE)}</style>",
        "<script>library</script>": f"<script>{read(_LIBRARY)}</script>",
        "<script></script>": f"<script>\n{script}</script>",
    }
    text = read("page.html")
    for place, content in parts.items():
        assert text.count(place) == 1
        text = text.replace(place, content)
    return text


def page_headers() -> dict[str, str]:
    """Headers that let the page run its own script and style, by their hashes, and nothing else."""
    text = page_text()

    def hashes(tag: str) -> str:
        found = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(one.encode("utf-8")).digest()).decode("ascii") for one in found]
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
