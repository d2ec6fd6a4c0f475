"""A grammar checked in a process of its own, which may use only so much memory and time.

A schema comes from outside, and a small one can ask for gigabytes (a few dozen patterns that must hold together do).
Running out of memory in there ends that process, not the server. Run as a program: grammar on stdin, error on stdout.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MAX_EXTRA_BYTES = 256 * 1024 * 1024
MAX_CPU_SECONDS = 3
_TOO_COMPLEX = "it is too complex to be enforced"


def check_grammar(lark: str) -> str:
    """What is wrong with a grammar; empty if nothing is."""
    try:
        checked = subprocess.run(
            [sys.executable, str(Path(__file__))], input=lark.encode("utf-8"), stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, timeout=10 * MAX_CPU_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return _TOO_COMPLEX
    return checked.stdout.decode("utf-8", errors="replace") if checked.returncode == 0 else _TOO_COMPLEX


def main() -> None:
    """Limit this process, then validate what comes."""
    import resource

    import llguidance

    lark = sys.stdin.buffer.read().decode("utf-8")
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MAX_EXTRA_BYTES, held + MAX_EXTRA_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS))
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
        llguidance.LLMatcher.grammar_from_lark(lark)
    )
    sys.stdout.buffer.write("\n".join(messages if is_error else []).encode("utf-8", errors="replace"))


if __name__ == "__main__":
    main()
