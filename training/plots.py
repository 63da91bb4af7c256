"""The plots of the stories, read from plots/*.txt: one file is one plot.

`things` names the kinds of things it can be about: kinds of world.THINGS, or `any` but `not` some; `small` is what one
can carry. `dry` keeps it out of the water, `alone` means that there is no friend in it. `who`
are words in which somebody may ask for it, `?` a question with its answer, `=` a summary. Then the beats: after each
`-` (with the chance that it is told at all) the ways to tell it. `moral` is the last beat. What a question asks for is
a slot, so that every way to tell a beat agrees with it.
"""

from dataclasses import dataclass, field
from pathlib import Path

from . import world
from .grammar import Template, parse


@dataclass
class Plot:
    name: str
    kinds: set[str] = field(default_factory=set)  # of things it can be about
    special: bool = False  # ... which it was made for
    heavy: bool = True  # also things that nobody can carry
    friend: bool = True
    dry: bool = False  # not for those who live in water
    who: list[Template] = field(default_factory=list)
    questions: list[tuple[Template, Template]] = field(default_factory=list)
    summary: Template = field(default_factory=list)
    beats: list[tuple[float, list[Template]]] = field(default_factory=list)
    moral: list[Template] = field(default_factory=list)


def _read_kinds(plot: Plot, words: list[str]) -> None:
    plot.heavy = words[0] != "small"
    kinds = words[1:] if words[0] in ("any", "small") else words
    plot.special = bool(kinds) and kinds[0] != "not"
    plot.kinds = set(kinds) if plot.special else set(world.USES) - set(kinds)


def _read(path: Path) -> Plot:
    plot = Plot(path.stem)
    lines: list[Template] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        key, _, rest = line.partition(" ")
        if key == "things":
            _read_kinds(plot, rest.split())
        elif line == "alone":
            plot.friend = False
        elif line == "dry":
            plot.dry = True
        elif key == "who":
            plot.who = [parse(way.strip()) for way in line.split(" | ")]
        elif key == "?":
            question, _, answer = rest.partition(" = ")
            plot.questions.append((parse(question), parse(answer)))
        elif key == "=":
            plot.summary = parse(rest)
        elif key in ("-", "moral"):
            lines = []
            if key == "moral":
                plot.moral = lines
            else:
                plot.beats.append((float(rest or 1), lines))
        elif line:
            lines.append(parse(line))
    return plot


PLOTS = [_read(path) for path in sorted((Path(__file__).parent / "plots").glob("*.txt"))]
