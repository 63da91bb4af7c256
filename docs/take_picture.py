"""A picture of the page at /, of a real conversation: `python docs/take_picture.py` writes docs/page.png (Chromium)."""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import browsing  # noqa: E402
from serving import serving  # noqa: E402

TARGET = Path(__file__).parent / "page.png"
ASKED = ("Tell me a story about a fox and a lantern.", "Where did the fox live?", "What is 32 - 19?")


def take(folder: Path, dark: bool = False) -> bytes:
    with serving(folder, "--log-level", "warning") as server, browsing() as page:
        page.show_as(1120, 720, dark=dark, scale=2)
        page.go(f"{server.address}/")
        page.until("document.querySelector('#model').textContent")
        for chat in (ASKED[2:], ASKED[:2]):
            page.click("#new")
            for text in chat:
                page.click("#draft")
                page.type(text)
                page.press("Enter")
                page.until("!document.body.classList.contains('running')")
                page.until("document.querySelector('.turn:last-child .stats')")
        page.mouse("mouseMoved", 2, 400)  # away from what would show that it is there
        return bytes(page.picture())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        TARGET.write_bytes(take(Path(folder), dark="--dark" in sys.argv))
