"""Renders chat templates in a process of its own, which a template that runs away may exhaust.

`qoff.hf.chat` starts it as a script, with the folders of jinja2 and markupsafe as arguments: it
needs neither torch nor qoff. Messages in both directions are 8 bytes of length, little endian, and
JSON. A request has `template`, `variables`, and `limits`: seconds of CPU time, characters. The
names that templates find are those that transformers documents for them.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import IO, Any

_MEMORY = 1 << 30  # bytes of address space


def environment() -> Any:
    """jinja2's sandbox for templates from anywhere, with what chat templates use."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what an assistant says; it changes nothing here."""

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    Generation.tags = {"generation"}

    class Dict:
        """`dict` without the attributes of a class."""

        fromkeys = staticmethod(dict.fromkeys)

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

    def refuse(message: object) -> None:
        raise TemplateError(str(message))

    def to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    found.filters["tojson"] = to_json
    found.globals.update(
        dict=Dict(), raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form)
    )
    return found


def answer(jinja: Any, request: dict[str, Any]) -> dict[str, str]:
    """`text`, or `error`: one line, and `fatal` where the process should not go on."""
    seconds, characters = request["limits"]
    signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
    try:
        pieces, total = [], 0
        for piece in jinja.from_string(request["template"]).generate(**request["variables"]):
            total += len(piece)
            if total > characters:
                return {"error": f"it makes more than {characters} characters"}
            pieces.append(piece)
        return {"text": "".join(pieces)}
    except MemoryError:
        return {"error": f"it needs more than {_MEMORY >> 20} MiB of memory", "fatal": "yes"}
    except Exception as error:
        return {"error": " ".join(str(error).split()) or type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def read(source: IO[bytes]) -> bytes:
    """A message; none at the end of the pipe."""
    return source.read(int.from_bytes(source.read(8), "little"))


def write(target: IO[bytes], message: bytes) -> None:
    target.write(len(message).to_bytes(8, "little") + message)
    target.flush()


def encoded(message: dict[str, Any]) -> bytes:
    """Half of a surrogate pair stays what it is."""
    return json.dumps(message).encode()


def main() -> None:
    """Answer requests until there are no more."""
    sys.path.extend(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is its parent's to handle
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = _MEMORY if most == resource.RLIM_INFINITY else min(_MEMORY, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    jinja = environment()
    jinja.from_string = lru_cache(maxsize=8)(jinja.from_string)  # most requests have one template
    while True:
        message = read(sys.stdin.buffer)
        if not message:
            return
        found = answer(jinja, json.loads(message))
        write(sys.stdout.buffer, encoded(found))
        if "fatal" in found:
            return


if __name__ == "__main__":
    main()
