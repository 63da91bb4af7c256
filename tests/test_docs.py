"""What is generated is up to date, what is recorded is real, and every link leads somewhere."""

import os
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import halfbyte
from halfbyte import listing

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import make_ops  # noqa: E402
import record  # noqa: E402
from screen import Look, Screen  # noqa: E402

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
STYLED = (
    "one \x1b[1;31mred\x1b[0m\r\n\x1b[2mdim\x1b[22m \x1b[38;5;208mx\x1b[48;2;1;2;3my\x1b[39;49m\r\n"
    "old\r\x1b[Knew\x1b[?25l\x1b]0;a title\x07"
)


def texts(svg, kind=None):
    """The text of every element of a recording; of one kind, those that stay ("wait") or those that pass ("pass")."""
    groups = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}g")
    return [text for group in groups if kind in (None, group.get("class")) for text in group.itertext()]


def test_the_op_reference_is_up_to_date():
    text = (DOCS / "ops.md").read_text(encoding="utf-8")
    assert text == make_ops.reference(), "run: python docs/make_ops.py"
    assert {op.name for op in listing.ops()} <= set(re.findall(r"^### (\w+)$", text, re.M))


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_a_screen_understands_pieces_of_any_size(size):
    screen = Screen(20, 4)
    for start in range(0, len(STYLED), size):
        screen.feed(STYLED[start : start + size])
    assert screen.text() == "one red\ndim xy\nnew"
    looks = [screen.cells[row][column].look for row, column in ((0, 4), (1, 0), (1, 4), (1, 5), (2, 0))]
    orange = "#ff8700"
    assert looks[0] == Look(fore="#ff7b72", bold=True) and looks[1] == Look(dim=True)
    assert looks[2:] == [Look(fore=orange), Look(fore=orange, back="#010203"), Look()]


def test_a_screen_wraps_scrolls_and_refuses():
    screen = Screen(4, 2)
    screen.feed("abcdef\r\ngh\x1b[A\x1b[4G!")
    assert screen.text() == "ef !\ngh"
    with pytest.raises(ValueError, match="'P'"):
        screen.feed("\x1b[P")


def test_a_session_is_recorded_as_it_happened(tmp_path):
    """A real shell: what stays is drawn from its time on, what was rewritten is drawn until then."""
    environment = {"PATH": os.environ["PATH"], "TERM": "xterm", "PS1": "$ "}
    typed = r"printf 'waiting'; sleep 0.2; printf '\r\033[K\033[1m<done> & gone\033[0m\n'"
    film, screen = record.record([("$ ", typed), ("$ ", "")], record.SHELL, environment, str(tmp_path))
    assert screen.text().splitlines()[-2:] == ["<done> & gone", "$"]
    drawn = record.svg(film, "a test")
    assert texts(drawn, "pass") == ["waiting"] and "<done> & gone" in texts(drawn, "wait")
    starts = [float(number) for number in re.findall(r'class="wait" style="animation-duration:([\d.]+)s', drawn)]
    assert starts[-1] >= max(starts[:-1]) and starts[-1] > len(typed) * record.KEY


def test_a_prompt_that_does_not_come_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "PATIENCE", 0.5)
    with pytest.raises(TimeoutError, match=r"'# ' came; the screen shows:\n\$"):
        record.record([("# ", "")], record.SHELL, {"PATH": os.environ["PATH"], "PS1": "$ "}, str(tmp_path))


def test_the_recorded_session_is_of_this_version():
    shown = " ".join(texts((DOCS / "session.svg").read_text(encoding="utf-8")))
    assert f"halfbyte {halfbyte.__version__}" in shown, "run: python docs/record.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"", page.read_text(encoding="utf-8")):
        target, _, anchor = "".join(link).partition("#")
        if "://" in target:
            continue
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
            assert anchor in [re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings]
