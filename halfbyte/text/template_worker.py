"""The process in which chat templates run. A template is code of a stranger: jinja's sandbox keeps it from everything
but its variables, and this process, which may be killed at any moment, keeps it from eating the machine.

Run as a script by template.py, with only the standard library and jinja2 on board. The environment is that of
transformers' apply_chat_template, since templates are written for it.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.parser import Parser


class Generation(jinja2.ext.Extension):
    """{% generation %} marks what training learns from; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Dict:
    """`dict` without the type's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class Namespace(jinja2.utils.Namespace):
    """`namespace` without underscored names, which reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # like jinja's, so that namespace(self=...) works
        self, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            Namespace.check(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        Namespace.check(name)
        super().__setitem__(name, value)

    @staticmethod
    def check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}: names with a leading underscore are refused")


def raise_exception(message: Any) -> NoReturn:
    raise TemplateError(str(message))


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Without jinja's escapes for HTML: models read the text, browsers do not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=8)
def compiled(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "dict": Dict(),
        "namespace": Namespace,
    }
    return environment.from_string(source)


def render(source: str, variables: dict[str, Any], output: int) -> str:
    """The text, or a TemplateError once it exceeds `output` bytes."""
    pieces, length = [], 0
    for piece in compiled(source).generate(variables):
        pieces.append(piece)
        length += len(piece.encode("utf-8", "surrogatepass"))
        if length > output:
            raise TemplateError(f"it writes more than {output >> 20} MB")
    return "".join(pieces)


def answer(request: dict[str, Any]) -> dict[str, str]:
    """{"text"}, or {"error"} with what the template did wrong, and "spent" where that took all the memory."""
    try:
        return {"text": render(request["template"], request["variables"], request["output"])}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except MemoryError:
        return {"error": "it takes too much memory", "spent": "yes"}
    except RecursionError:
        return {"error": "it calls itself without end"}
    except Exception as error:  # whatever a stranger's code raises is its own fault
        named = "" if type(error) is TemplateError else f"{type(error).__name__}: "
        return {"error": f"{named}{error}"[:1000]}


if __name__ == "__main__":
    sys.path.append(os.path.dirname(__file__))
    from confinement import serve  # type: ignore[import-not-found]

    for late in ("{{ strftime_now('%Y') | tojson }}", "{{ raise_exception('') }}"):  # loads what is loaded at first use
        answer({"template": late, "variables": {}, "output": 9})
    serve(answer)
