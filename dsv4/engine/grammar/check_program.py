"""Checks a grammar in a process that may use only so much memory and time: grammar on stdin, error on stdout."""

import sys
from pathlib import Path

MAX_EXTRA_BYTES = 256 * 1024 * 1024
MAX_CPU_SECONDS = 3


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
