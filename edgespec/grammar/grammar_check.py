"""Check, in a child process, that llama.cpp can use a grammar: some grammars crash or stall the library.

The library prints text that it cannot parse to stderr; deep nesting overflows its stack; rules that refer to
each other in many ways take years; a rule that begins with itself, after a part that may be empty, takes all
memory, perhaps only when a generation reaches it. So the child has little stack, time and memory, and expands
the beginning of every rule, not only of the root.
"""

from __future__ import annotations

import os
import re
import resource
import tempfile
import threading
from functools import lru_cache
from pathlib import Path

from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.child import REFUSED, Conversation, answer

LONGEST = 1 << 18
"""Most bytes of a grammar."""

_STACK_BYTES = 2 << 20  # less than a thread of this process has
_MEMORY_BYTES = 512 << 20
_CPU_SECONDS = 2
_LONGEST_REASON = 120
_MOST_REPETITIONS = 2000  # of one item; the library takes a larger limit as no limit

# Strings, classes and comments, which contain no names of rules.
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)


def check_grammar(text: str, name: str) -> None:
    """Raise UsageError, whose field is `name`, if the library cannot use the grammar."""
    reason = _fault(text) or _refusal(text)
    if reason:
        raise UsageError(reason, field=name)


def _fault(text: str) -> str | None:
    """Return a fault that can be seen without the library, or None."""
    try:
        n_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        return f"not valid Unicode at character {error.start}"
    if n_bytes > LONGEST:
        return f"a grammar of {n_bytes:,} bytes: at most {LONGEST:,} are taken"
    if "\0" in text:
        return "a grammar cannot have a byte 0; write it as \\x00"
    bare = _QUOTED.sub(" ", text)
    names = _names(bare)
    if not names:
        return "no rules: a grammar is lines such as `root ::= [a-z]+`"
    if "root" not in names:
        return "no rule named root, which the text would have to match"
    if "<" in bare or "!" in bare:
        return "a rule of single tokens (<...>): only text can be matched"
    repeated = re.findall(r"\d+", " ".join(re.findall(r"\{([\d,\s]*)\}", bare)))
    if any(len(n) > 9 or int(n) > _MOST_REPETITIONS for n in repeated):
        return f"an item repeated more than {_MOST_REPETITIONS:,} times: that many cannot be told apart"
    return None


def _names(bare: str) -> list[str]:
    return re.findall(r"([A-Za-z0-9-]+)[ \t]*::=", bare)


@lru_cache(maxsize=256)
def _refusal(text: str) -> str | None:
    """Return why the library refuses a grammar; None if it does not."""
    child = Conversation(__name__, "_in_child", text)
    for _ in child:  # sends no pairs
        pass
    if child.ended.code == 0:
        return None
    if child.ended.code == REFUSED:
        return child.ended.complaint
    return "too deep or too ambiguous: llama.cpp would not get to its end"


def _in_child() -> int:
    return answer(str, _compile)


def _compile(text: str) -> None:
    """Have the library compile `text`, with little stack, time and memory. Raises EdgespecError."""
    from edgespec.llama import backend  # only the child needs the library

    everything = "every-rule"
    while everything in text:
        everything += "-x"
    names = _names(_QUOTED.sub(" ", text))
    all_begun = f"{text}\n{everything} ::= {' | '.join(dict.fromkeys(names))}\n"
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(usage.ru_utime + usage.ru_stime) + 1 + _CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    n_pages = int(Path("/proc/self/statm").read_text().split()[0])
    n_bytes = n_pages * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    reasons: list[str] = []

    def work() -> None:
        with tempfile.TemporaryFile() as printed:
            shown = os.dup(2)
            os.dup2(printed.fileno(), 2)
            backend.clear_log()
            made = backend.llama.llama_sampler_init_grammar(None, all_begun.encode(), everything.encode())
            os.dup2(shown, 2)
            if not made:
                printed.seek(0)
                lines = printed.read().decode(errors="replace").splitlines()
                # "parse: error parsing grammar: expecting ..." and then all of the grammar
                found = lines[0].split(": ", 2)[-1] if lines else backend.failure_reason()
                reasons.append(" ".join(found.split())[:_LONGEST_REASON])

    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if reasons:
        raise EdgespecError(reasons[0])
