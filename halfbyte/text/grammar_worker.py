"""The process in which schemas and grammars of strangers are tried before anybody is held to one: some compile for
ever, or take all memory, and a thread that does cannot be stopped.

Run as a script by grammar.py, with only the standard library and llguidance on board; what it knows of forms is used
there too.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any

SHOWN = 300  # characters of what the compiler says
# Between the tokens of JSON: enough to indent, and an end to the spaces that a small model would write for ever.
WHITESPACE: Any = {"whitespace_pattern": r"( |\n {0,16})?"}
LENIENT: Any = {"lenient": True}  # keywords that llguidance does not know are no error
NOWHERE = "no reply can follow it: it leads nowhere, or back to itself before a first character"
PLAIN = {  # what llguidance says in words of its own, or of options that nobody has here
    "NoExtensionBias": NOWHERE, "NoExtension": NOWHERE,
    "LexerTooComplex": "it is too complex", "ParserTooComplex": "it is too complex",
    "SearchRegex ": "", "Expecting object schema to apply options": "a schema is a JSON object",
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf": "Use anyOf.",
}  # fmt: skip
UNKNOWN = ("look-around", "backreferences")  # nor what JSON's regular expressions have and its own have not


def made(kind: str, source: str) -> str:
    """The grammar that llguidance compiles; a ValueError of more lines than one."""
    import llguidance

    if kind in ("json_schema", "tool"):
        overrides = WHITESPACE if kind == "json_schema" else LENIENT
        return str(llguidance.LLMatcher.grammar_from_json_schema(source, overrides=overrides))
    return str(llguidance.grammar_from(kind, source))  # type: ignore[arg-type]


def refusal(kind: str, source: str) -> str:
    """What is wrong with a form, "" if nothing is. Of a "tool", only what is no schema: one that no reply could be held
    to is fine where nobody is, a model just reads it.
    """
    import llguidance

    try:
        grammar = made(kind, source)
        wrong = llguidance.LLMatcher.validate_grammar(grammar)
        if kind != "tool" and not wrong:
            matcher = llguidance.LLMatcher(bytewise(), grammar, log_level=0)
            matcher.compute_bitmask()  # the work that is left over for the first token
            wrong = matcher.get_error() if matcher.is_error() else ""
    except ValueError as error:
        wrong = str(error)
    known = kind == "tool" and any(word in wrong for word in UNKNOWN)
    return said(wrong) if wrong and not known else ""


@cache
def bytewise() -> Any:
    """A tokenizer for which every byte is a token."""
    import llguidance

    return llguidance.LLTokenizer("byte")


def said(text: str) -> str:
    """The first line, and what is wrong with a regular expression: what stands between quotes the whole grammar."""
    first, *more = text.strip().split("\n")
    for theirs, plain in PLAIN.items():
        first = first.replace(theirs, plain)
    return " ".join([first, *(line.removeprefix("error: ") for line in more if line.startswith("error: "))])[:SHOWN]


def answer(request: dict[str, Any]) -> dict[str, str]:
    """{"text"}, or {"error"} with what is wrong with the first form that cannot be followed."""
    for kind, source in request["forms"]:
        if wrong := refusal(kind, source):
            return {"error": wrong}
    return {"text": ""}


if __name__ == "__main__":
    sys.path.append(os.path.dirname(__file__))
    from confinement import serve  # type: ignore[import-not-found]

    refusal("json_schema", "{}")  # loads what is loaded at first use
    serve(answer)
