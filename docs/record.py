"""Records a real terminal session as an animated SVG: `python docs/record.py` writes docs/session.svg (Linux, macOS).

A shell runs in a pseudo-terminal, text is typed into it, and what comes back is drawn at the times at which it came.
Every character on the screen has a life; those that begin and end together become one text element. Where nothing may
move (a viewer without CSS animations, a reader who asked for stillness) the picture is the last screen.
"""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import tempfile
import termios
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from screen import BLANK, Cell, Screen

TARGET = Path(__file__).parent / "session.svg"
SHELL = ("bash", "--norc", "--noprofile", "--noediting", "-i")
COLUMNS, ROWS = 92, 40
SESSION = (  # what stands before the cursor, and what is typed then
    ("$ ", "halfbyte chat"),
    ("> ", "Tell me a story about a fox and a lantern."),
    ("> ", "Where did the fox live?"),
    ("> ", "What is 32 - 19?"),
    ("> ", "/exit"),
    ("$ ", ""),
)
KEY, THOUGHT, PATIENCE = 0.03, 0.5, 120.0  # seconds: a key, before a line is typed, until we give up

CELL, LINE, MARGIN, BAR = 8.4, 20.0, 18, 36  # pixels
BACK, FORE, FAINT, FRAME = "#0d1117", "#e6edf3", "#8b949e", "#30363d"
STYLE = f"""
text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:{FORE};white-space:pre}}
.wait{{animation:hide 0s}} .pass{{visibility:hidden;animation:show 0s}}
@keyframes hide{{from,to{{visibility:hidden}}}}
@keyframes show{{from,to{{visibility:visible}}}}
@media(prefers-reduced-motion:reduce){{.wait,.pass{{animation:none}}}}
"""


class Life(NamedTuple):
    """What a place of the screen showed from `start` to `end`; None where it stays."""

    row: int
    column: int
    cell: Cell
    start: float
    end: float | None = None


class Film:
    """What every place of the screen showed, and when."""

    def __init__(self) -> None:
        self.ended: list[Life] = []
        self.open: dict[tuple[int, int], Life] = {}

    def take(self, now: float, screen: Screen) -> None:
        now = round(now, 2)
        for row, cells in enumerate(screen.cells):
            for column, cell in enumerate(cells):
                life = self.open.get((row, column))
                if cell == (BLANK if life is None else life.cell):
                    continue
                if life is not None:
                    del self.open[row, column]
                    self.ended += [life._replace(end=now)] if now > life.start else []
                if cell != BLANK:
                    self.open[row, column] = Life(row, column, cell, now)

    def lives(self) -> list[Life]:
        return [*self.ended, *self.open.values()]


def record(
    session: Sequence[tuple[str, str]], shell: Sequence[str], environment: dict[str, str], folder: str
) -> tuple[Film, Screen]:
    """Type a session into a shell that runs in `folder`, and film its screen."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        termios.tcsetwinsize(0, (ROWS, COLUMNS))
        os.execvpe(shell[0], shell, environment)
    screen, film, decoder = Screen(COLUMNS, ROWS), Film(), getincrementaldecoder("utf-8")()
    start = time.monotonic()

    def watch(seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Film for so long, or until something has come true; whether it has."""
        deadline = time.monotonic() + seconds
        while not until() and (left := deadline - time.monotonic()) > 0:
            if select.select([terminal], [], [], min(left, 0.05))[0]:
                screen.feed(decoder.decode(os.read(terminal, 65536)))
                film.take(time.monotonic() - start, screen)
        return until()

    try:
        for prompt, typed in session:
            if not watch(PATIENCE, lambda prompt=prompt: screen.before_cursor() == prompt):  # type: ignore[misc]
                raise TimeoutError(f"no prompt {prompt!r} came; the screen shows:\n{screen.text()}")
            watch(THOUGHT)
            for key in f"{typed}\n" if typed else "":
                os.write(terminal, key.encode())
                watch(KEY)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)
    return film, screen


def svg(film: Film, title: str) -> str:
    lives = film.lives()
    width = COLUMNS * CELL + 2 * MARGIN
    height = (max(life.row for life in lives) + 1) * LINE + BAR + MARGIN
    dots = "".join(f'<circle cx="{MARGIN + 6 + 20 * i}" cy="18" r="6" fill="{FRAME}"/>' for i in range(3))
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{width:g}" height="{height:g}" rx="10" fill="{BACK}"/>{dots}',
        *map(drawn, runs(lives)),
        "</svg>\n",
    ])  # fmt: skip


def runs(lives: list[Life]) -> list[list[Life]]:
    """Lives of one row that look alike and begin and end together, with the spaces between words."""

    def alike(life: Life) -> tuple[object, ...]:
        return life.row, life.start, life.end or 0.0, repr(life.cell.look)

    found: list[list[Life]] = []
    for _, group in groupby(sorted(lives, key=lambda life: (*alike(life), life.column)), alike):
        last = -1000
        for life in group:
            if life.column - last > 3:
                found.append([])
            found[-1].append(life)
            last = life.column
    return found


def drawn(run: list[Life]) -> str:
    first, look = run[0], run[0].cell.look
    text = [" "] * (run[-1].column - first.column + 1)
    for life in run:
        text[life.column - first.column] = life.cell.character
    x, y, width = MARGIN + first.column * CELL, BAR + first.row * LINE, len(text) * CELL
    fore, back = look.fore or (FAINT if look.dim else FORE), look.back
    if look.inverse:
        fore, back = back or BACK, fore
    styles = {
        f"fill:{fore}": fore != FORE, "font-weight:600": look.bold, "font-style:italic": look.italic,
        "text-decoration:underline": look.underline,
    }  # fmt: skip
    style = ";".join(name for name, wanted in styles.items() if wanted)
    body = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{LINE:g}" fill="{back}"/>' if back else ""
    body += f'<text x="{x:g}" y="{y + 14.5:g}" textLength="{width:g}"' + (f' style="{style}"' if style else "")
    body += f">{escape(''.join(text), quote=False)}</text>"
    if first.end is None:
        return f'<g class="wait" style="animation-duration:{first.start:g}s">{body}</g>'
    lasting = f"animation-delay:{first.start:g}s;animation-duration:{first.end - first.start:.2f}s"
    return f'<g class="pass" style="{lasting}">{body}</g>'


def main() -> None:
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # compiled kernels; the home is an empty one
    with tempfile.TemporaryDirectory() as home:
        environment = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "HOME": home, "XDG_CACHE_HOME": cache, "TERM": "xterm-256color", "LANG": "C.UTF-8", "PS1": "$ ",
        }  # fmt: skip
        film, screen = record(SESSION, SHELL, environment, home)
        for private in (home, cache, sys.prefix):
            if private in screen.text():
                raise ValueError(f"the screen shows {private}, a path of this machine")
    TARGET.write_text(svg(film, "halfbyte chat, recorded by docs/record.py"), encoding="utf-8")


if __name__ == "__main__":
    main()
