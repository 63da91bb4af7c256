"""The command line: one file of commands/ a command; its `run` does the work, and the docstring of that is the help.

Nothing heavy is imported before a command needs it, so that help is instant.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from . import __version__
from .commands.interrupts import interrupts
from .errors import HalfbyteError, StorageError
from .progress import passing

COMMANDS = (
    "chat", "generate", "serve", "pull", "list", "rm", "info", "plan", "convert", "perplexity", "verify", "doctor",
    "bench", "bench ops", "bench load", "ops",
)  # fmt: skip
SHARED = ("device", "revision", "offline", "json")  # what a command takes that does not say otherwise


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """What is wrong in one line, not under a page of all that would be right."""
        self.exit(2, f"{self.prog}: error: {message}\n`{self.prog} --help` lists what it takes.\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """As argparse's, which takes help that could not be written for written."""
        if file is sys.stdout:
            print(message, end="", flush=True)
        else:
            super()._print_message(message, file)


def parser(argv: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """Commands that do not occur in `argv` are listed only: what their arguments need is not imported."""
    top = Parser(prog="halfbyte", description="Quantised expert models on the machine you have.")
    top.add_argument("--version", action="version", version=f"halfbyte {__version__}")
    commands = top.add_subparsers(required=True, metavar="command", title="commands")
    for name in COMMANDS:
        module = import_module(f".commands.{name.replace(' ', '_')}", __package__)
        text = module.run.__doc__ or ""
        added = commands.add_parser(name, help=text.split("\n")[0], description=text)
        added.set_defaults(run=module.run, parser=added)
        if name in argv:
            module.arguments(added)
            add_shared(added, getattr(module, "SHARED", SHARED))
    return top


def add_shared(command: argparse.ArgumentParser, names: tuple[str, ...]) -> None:
    """The arguments that mean the same everywhere."""
    if "device" in names:
        command.add_argument(
            "--device", choices=["cpu", "cuda", "mps"], help="where to run (default: the best there is)"
        )
    if "revision" in names:
        command.add_argument("--revision", metavar="NAME", help="branch, tag or commit on the hub")
    if "offline" in names:
        command.add_argument("--offline", action="store_true", help="fetch nothing")
    if "json" in names:
        command.add_argument("--json", action="store_true", help="print one JSON object")


def joined(argv: list[str]) -> list[str]:
    """`bench ops` is a command of two words; `bench ./ops` is a model in the folder ops."""
    two = " ".join(argv[:2])
    return [two, *argv[2:]] if len(argv) > 1 and two in COMMANDS else argv


def open_closed() -> None:
    """Streams that were closed lead nowhere: a file that is opened later would be taken for them, and written into."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # the first that is free is its own number
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (for the life of the process)


def main(argv: list[str] | None = None) -> int:
    open_closed()
    try:
        with interrupts():
            words = joined(sys.argv[1:] if argv is None else argv)
            args = parser(words).parse_args(words)
            if os.environ.get("HALFBYTE_WITHOUT"):
                import_module(".fusion", __package__)  # refuses what it does not know, whatever the command
            status: int = args.run(args)
            sys.stdout.flush()
            return status
    except HalfbyteError as error:
        passing("")
        print(f"halfbyte: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        passing("")
        return 130
    except BrokenPipeError:  # the reader (`| head -1`) has seen enough
        lose_output()
        return 141
    except OSError as error:  # what no command has words for: a folder that is locked, a name that is too long
        passing("")
        place = "" if error.filename is None else f"{error.filename}: "
        print(f"halfbyte: {place}{error.strerror or error}.", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # Python would try once more, and say so
            lose_output()
        return StorageError.exit_code


def lose_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
