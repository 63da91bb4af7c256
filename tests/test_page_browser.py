"""The page in a real browser, by a real server: what is clicked, typed and seen, and what hostile words cannot do."""

import json
import re

import pytest
from browser import MISSING, SHIFT, browsing, installed
from serving import serving

import halfbyte

pytestmark = pytest.mark.skipif(not installed(), reason=MISSING)
KEY = "key-of-the-tests"
FOX = "Tell me a story about a fox."
# A model that says what it is told to: "Say <think>…</think>…". And one that takes its time, if asked "slowly".
PARROT = """
import time
from contextvars import ContextVar
from halfbyte.engine import Engine
from halfbyte.server import app, schema
from halfbyte.text.reply import Event
asked, slow = ContextVar("asked", default=""), []
chat, deltas, step = schema.chat, app.ChatAnswer.deltas, Engine.step
def heard(*args):
    wish = chat(*args)
    asked.set(wish.messages[-1]["content"])
    slow[:] = [0.03] * ("slowly" in asked.get())
    return wish
def repeated(self, index, piece):
    if asked.get().startswith("Say "):
        if not hasattr(self, "rest"):
            thought, _, said = asked.get()[4:].rpartition("</think>")
            self.rest = [("reasoning", letter) for letter in thought.removeprefix("<think>")]
            self.rest += [("text", letter) for letter in said]
        many = 7 if piece.finish_reason is None else len(self.rest)
        piece.events = [Event(kind, letter) for kind, letter in self.rest[:many]]
        del self.rest[:many]
    return deltas(self, index, piece)
def stepped(self):
    time.sleep(sum(slow))
    return step(self)
schema.chat, app.ChatAnswer.deltas, Engine.step = heard, repeated, stepped
"""
HOSTILE = """<script>window.stolen = 1</script><img src=x onerror="window.stolen = 2">

<iframe src="javascript:parent.stolen = 3"></iframe> <svg/onload=window.stolen=4>

[click me](javascript:window.stolen=5) [and me](JaVaScRiPt:window.stolen=6) [data](data:text/html,<script>1</script>)
[inner](vbscript:x) ![picture](javascript:window.stolen=7) <javascript:window.stolen=8>

![tracker](http://tracker.invalid/pixel.png) [a "title](http://a.invalid/"onmouseover="window.stolen=9)

```html" onmouseover="window.stolen=10
</code></pre><script>window.stolen = 11</script>
```

| <b>a</b> | <script>window.stolen = 12</script> |
|---|---|
| <img src=x onerror=window.stolen=13> | `</code><script>window.stolen=14</script>` |

# <a href="javascript:window.stolen=15">heading</a>
- <style>body { display: none }</style>
> <base href="http://evil.invalid/"> <meta http-equiv="refresh" content="0;url=http://evil.invalid/">
"""
MARKDOWN = """# Title

A **bold** and *slanted* and ~~gone~~ word, `code * here`, snake_case_name, 2 * 3 * 4.

1. one
2. two
   - inner
   - other

> quoted

| a | b |
|---|--:|
| 1 | 2 |

```python
def f(x):  # why
    return "<b>"
```

[a link](https://example.invalid/path_(x)) and https://example.invalid/bare.
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), key=KEY, faults=PARROT) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    with browsing() as running:
        yield running


@pytest.fixture
def stranger(browser, server):
    """The page as it is seen first, without a key."""
    browser.show_as(1200, 800)
    browser.go(f"{server.address}/health")
    browser.run("localStorage.clear(), sessionStorage.clear()")
    browser.events.clear()
    browser.go(f"{server.address}/")
    return browser


@pytest.fixture
def page(browser, server):
    """The page of somebody whose key is known; what it says to nobody but its server is checked at the end."""
    browser.show_as(1200, 800)
    browser.go(f"{server.address}/health")
    browser.run(f"localStorage.clear(), sessionStorage.setItem('halfbyte.key', {json.dumps(KEY)})")
    browser.events.clear()
    browser.go(f"{server.address}/")
    browser.until("document.querySelector('#model').textContent === 'tiny'")
    yield browser
    asked = [event["request"]["url"] for event in browser.told("Network.requestWillBeSent")]
    assert asked and all(url.startswith((f"{server.address}/", "data:image/svg+xml")) for url in asked), asked
    assert not browser.told("Runtime.exceptionThrown")


def ask(page, text, *, end=True):
    page.run("document.querySelector('#draft').focus()")
    page.type(text)
    page.press("Enter")
    page.until("document.querySelector('.turn.assistant:last-child')")
    if end:
        page.until("!document.body.classList.contains('running')")
    return page.text(".turn.assistant:last-child .answer")


def sent(page):
    """The bodies of the chats that were asked for."""
    requests = [event["request"] for event in page.told("Network.requestWillBeSent")]
    return [json.loads(request["postData"]) for request in requests if request.get("postData")]


def test_a_key_is_asked_for_until_it_is_right(stranger, server):
    page = stranger
    page.until("document.querySelector('#key').open")
    assert "asks for an API key" in page.text("#key") and "does not take" not in page.text("#key")
    page.type("not-the-key")
    page.press("Enter")
    page.until("document.querySelector('#key[open] .wrong:not([hidden])')")
    assert "does not take this key" in page.text("#key")
    page.type(KEY)
    page.click("#key .strong")
    page.until("document.querySelector('#model').textContent === 'tiny'")
    assert not page.run("document.querySelector('#key').open")
    assert page.run("localStorage.getItem('halfbyte.key')") is None  # kept for this tab alone unless asked
    assert ask(page, FOX)
    page.reload()
    page.until("document.querySelector('#model').textContent === 'tiny'")


def test_a_key_that_is_not_given_is_said(stranger):
    stranger.until("document.querySelector('#key').open")
    stranger.press("Escape")
    stranger.until("document.querySelector('#toast').innerText.includes('asks for an API key')")


def test_a_reply_streams_and_says_how_fast(page):
    """What is seen is what the library says, and it came in pieces."""
    page.click("#tune")
    page.click("#settings [name=temperature]")
    page.type("0")
    page.click("#settings .strong")
    page.run(
        "window.seen = new Set(); new MutationObserver(() => seen.add(document.querySelector('.answer')?.innerText))"
        ".observe(document.querySelector('#log'), {subtree: true, childList: true, characterData: true})"
    )
    said = ask(page, FOX)
    model, tokenizer = halfbyte.load("tiny", device="cpu")
    ids = tokenizer.chat_ids([{"role": "user", "content": FOX}])
    assert said.split() == halfbyte.generate(model, tokenizer, ids, max_tokens=1024, temperature=0).split()
    assert page.run("seen.size") > 5
    assert re.fullmatch(r"\d+ tokens · \d+\.\d tok/s · first token \d+\.\d\d s", page.text(".stats"))
    assert page.text(".turn.user .said") == FOX
    assert page.text("#said") == "The reply is complete"
    assert sent(page)[0]["temperature"] == 0


@pytest.mark.parametrize("way", ["click", "key"])
def test_stop_stops_the_server_too(page, server, way):
    ask(page, "Tell me slowly about a fox.", end=False)
    page.until("document.querySelector('.answer')?.innerText.length > 10")
    assert page.run("document.querySelector('#send').getAttribute('aria-label')") == "Stop"
    assert server.metric("requests_running") == 1
    page.click("#send") if way == "click" else page.press("Escape")
    page.until("!document.body.classList.contains('running')", 1)
    assert server.idle()
    assert page.text(".turn.assistant .note") == "Stopped." and page.text(".stats").startswith("about ")
    assert ask(page, FOX)  # and it goes on
    roles = [message["role"] for message in sent(page)[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_a_reply_that_a_reload_cuts_was_stopped(page):
    ask(page, "Tell me slowly about a fox.", end=False)
    page.until("document.querySelector('.answer')?.innerText.length > 10")
    page.reload()
    page.until("document.querySelector('.turn.assistant .note')")
    assert page.text(".turn.assistant .note") == "Stopped." and page.text(".turn.assistant .error") == ""
    assert len(page.text(".answer")) > 10


def test_conversations_outlive_a_reload(page):
    said = ask(page, FOX)
    page.reload()
    page.until("document.querySelector('#model').textContent === 'tiny'")
    assert page.text(".turn.user .said") == FOX and page.text(".answer") == said and page.text("#title") == FOX
    assert "tok/s" in page.text(".stats")
    ask(page, "What is 32 - 19?")
    assert [message["role"] for message in sent(page)[-1]["messages"]] == ["user", "assistant", "user"]
    page.click("#new")
    page.until("document.querySelector('#hello')")
    ask(page, "What is 2 + 2?")
    assert page.run("document.querySelectorAll('#list li').length") == 2
    page.click("#list li:nth-child(2) .open")
    page.until(f"document.querySelector('.said')?.innerText === {json.dumps(FOX)}")
    assert page.run("document.querySelectorAll('.turn').length") == 4


def test_a_conversation_is_renamed_deleted_and_brought_back(page):
    ask(page, FOX)
    page.click("#list li [aria-label=Rename]")
    page.type("About a fox")
    page.press("Enter")
    assert page.text("#title") == page.text("#list .open") == "About a fox"
    page.reload()
    assert page.text("#list .open") == "About a fox"
    page.click("#list li [aria-label=Delete]")
    page.until("document.querySelector('#hello')")
    assert page.text("#list") == "Nothing yet." and "chat" not in page.run("Object.keys(localStorage).join()")
    page.click("#toast button")
    page.until("document.querySelector('.answer')")
    assert page.text("#list .open") == "About a fox"


def test_settings_are_sent_kept_and_begin_the_next(page):
    page.click("#tune")
    page.click("#settings [name=system]")
    page.type("You are brief.")
    for name, value in {"top_k": "5", "seed": "7", "max_tokens": "9", "top_p": "9"}.items():
        page.click(f"#settings [name={name}]")
        page.type(value)
    page.press("Escape")
    page.until("!document.querySelector('#settings').open")
    ask(page, FOX)
    body = sent(page)[-1]
    assert body["messages"][0] == {"role": "system", "content": "You are brief."}
    assert (body["top_k"], body["seed"], body["max_tokens"]) == (5, 7, 9)
    assert "top_p" not in body and "temperature" not in body  # 9 is no such share; what is empty is the model's
    assert page.text(".note").startswith("Cut at the longest reply")
    first = page.text(".answer")
    page.click(".assistant [aria-label='Try again']")
    page.until("!document.body.classList.contains('running') && document.querySelector('.stats')")
    assert page.text(".answer") == first  # the same seed
    page.click("#new")
    ask(page, FOX)
    assert sent(page)[-1] == body


def test_hostile_words_stay_words(page):
    shown = ask(page, f"Say {HOSTILE}")
    assert page.run("window.stolen") is None
    made = page.run("[...new Set([...document.querySelectorAll('.assistant *')].map((one) => one.nodeName))]")
    assert not {"SCRIPT", "IMG", "IFRAME", "STYLE", "BASE", "META", "OBJECT", "B"} & set(made)
    links = page.run("[...document.querySelectorAll('.assistant a')].map((one) => one.href)")
    assert links and all(link.startswith("http://") for link in links)
    assert "javascript:window.stolen=5" in shown and "<script>window.stolen = 11</script>" in shown
    attributes = page.run(
        "[...document.querySelectorAll('.assistant *')].flatMap((one) => one.getAttributeNames())"
        ".filter((name) => name.startsWith('on'))"
    )
    assert attributes == []
    page.reload()  # as it was kept
    page.until("document.querySelector('.answer')")
    assert page.text(".answer") == shown and page.run("window.stolen") is None
    assert page.text("#title").startswith("Say <script>")
    blocked = "document.body.innerHTML = '<p>x</p>'"
    with pytest.raises(AssertionError, match="TrustedHTML"):
        page.run(blocked)


LONG = ("> " * 3000, "*a " * 20000, "**a " * 20000, "[" * 30000, "`a``b" * 10000, "- " * 4000, "- a\n" * 5000,
        "|" * 5000 + "\n" + "|-" * 5000, "_" * 30000, "<" * 30000, "![](" * 8000, "\\" * 30000, "http://" * 5000,
        "```\n" * 5000, "~~a" * 10000, "#" * 30000 + " x")  # fmt: skip


@pytest.mark.parametrize("text", LONG, ids=lambda text: repr(text[:4]))
def test_nothing_that_a_model_writes_takes_long(page, text):
    draw = f"markdown(document.createElement('div'), {json.dumps(text)})"
    assert page.run(f"(() => {{ const start = performance.now(); {draw}; return performance.now() - start }})()") < 500


def test_markdown_and_code(page):
    ask(page, f"Say {MARKDOWN}")
    shape = "[...document.querySelector('.answer').children].map((one) => one.className || one.nodeName)"
    assert page.run(shape) == ["H2", "P", "OL", "BLOCKQUOTE", "table", "code", "P"]
    paragraph = page.run("document.querySelector('.answer p').cloneNode(true).childNodes.length")
    assert page.text(".answer strong") == "bold" and page.text(".answer em") == "slanted" and paragraph == 9
    assert page.text(".answer p code") == "code * here" and "snake_case_name, 2 * 3 * 4." in page.text(".answer p")
    assert page.run("document.querySelectorAll('.answer ol > li').length") == 2
    assert page.texts(".answer ol ul li") == [
        "inner",
        "other",
    ]
    assert (
        page.text(".answer .code pre") == 'def f(x):  # why\n    return "<b>"' and page.text(".code header") == "python"
    )
    assert page.texts(".code .k, .code .c") == ["def", "# why", "return"]
    links = page.run("[...document.querySelectorAll('.answer a')].map((one) => [one.href, one.rel])")
    away = "noopener noreferrer nofollow"
    assert links == [["https://example.invalid/path_(x)", away], ["https://example.invalid/bare", away]]
    page.click(".code [aria-label='Copy code']")
    page.until("document.querySelector('#said').innerText === 'Copied'")


WIDE = """| Feature | Description | Throughput | Compatibility | Requirements |
|---|---|---|---|---|
| Quantisation | Mixed-precision representation | Extraordinary | Interoperability | Uncomplicated |
"""
BROKEN = """[...document.querySelectorAll('th, td')].filter((cell) => {
  const words = document.createRange();
  words.selectNodeContents(cell);
  return words.getClientRects().length > 1;
}).map((cell) => cell.innerText)"""


@pytest.mark.parametrize("width", [375, 1200])
def test_tables_scroll_and_break_no_word(page, width):
    page.show_as(width, 800)
    page.reload()
    ask(page, f"Say {WIDE.replace('Mixed-precision representation', 'Representations')}")
    assert page.run(BROKEN) == []
    if width == 375:
        assert page.run("document.querySelector('.table').scrollWidth > document.querySelector('.table').clientWidth")
    assert page.run("document.querySelector('#log').scrollWidth <= document.querySelector('#log').clientWidth")


def test_reasoning_is_folded_and_not_sent_back(page):
    ask(page, "Say <think>First this, then that.</think>The answer.")
    assert page.text(".answer") == "The answer." and page.run("document.querySelector('.think').open") is False
    assert "First this" not in page.text(".turn.assistant")
    page.click(".think summary")
    assert page.text(".think .body") == "First this, then that."
    ask(page, "What is 2 + 2?")
    assert sent(page)[-1]["messages"][1] == {"role": "assistant", "content": "The answer."}


def test_how_much_of_a_prompt_is_read_is_said(page):
    heard = "(() => { const run = {}; take(run, {comment: 'keep-alive %s'}, null); return run.state })()"
    assert page.run(heard % "900/8000") == "reading the prompt, 11 %"
    assert page.run(heard % "8000/8000") == page.run(heard % "0/0") == "waiting for the model"


def test_a_message_is_edited(page):
    ask(page, FOX)
    ask(page, "What is 2 + 2?")
    page.run("document.querySelector('.turn.user [aria-label=Edit]').click()")
    assert page.run("document.querySelector('#draft').value") == FOX
    page.run("document.querySelector('#draft').select()")
    ask(page, "What is 32 - 19?")
    assert page.run("document.querySelectorAll('.turn').length") == 2 and "13" in page.text(".answer")


FIRST_AGAIN = """document.querySelector('.turn.assistant [aria-label="Try again"]').click()"""


@pytest.mark.parametrize("at", ["once", "end"])
def test_turns_that_another_try_takes_away_come_back(page, at):
    """As soon as they are gone, or when the new reply is there; and what is said since is not taken away by that."""
    ask(page, FOX)
    ask(page, "Say what follows")
    said = page.texts(".turn .said, .turn .answer")
    page.run(FIRST_AGAIN)
    if at == "end":
        page.until("!document.body.classList.contains('running')")
    assert page.run("document.querySelectorAll('.turn').length") == 2
    page.click("#toast button")
    page.until("!document.body.classList.contains('running') && document.querySelectorAll('.turn').length === 4")
    assert page.texts(".turn .said, .turn .answer") == said and page.text("#toast") == ""
    page.reload()
    assert page.texts(".turn .said, .turn .answer") == said
    page.run(FIRST_AGAIN)
    page.until("!document.body.classList.contains('running') && document.querySelector('#toast button')")
    ask(page, "What is 2 + 2?")
    assert page.text("#toast") == ""


def test_trouble_is_said_and_can_be_tried_again(page):
    page.offline(True)
    ask(page, FOX)
    assert page.text(".turn .error") == "The server cannot be reached. Is it running?"
    page.offline(False)
    page.click(".assistant [aria-label='Try again']")
    page.until("document.querySelector('.answer') && !document.body.classList.contains('running')")
    assert not page.text(".turn .error")
    page.click("#new")
    ask(page, "word " * 50_000)
    assert page.text(".turn .error").startswith("The prompt has more than")


def test_it_is_usable_by_keys_alone(page):
    page.press("Escape")
    page.run("document.querySelector('#draft').focus()")
    page.type("one")
    page.press("Enter", SHIFT)
    page.type("two")
    assert page.run("document.querySelector('#draft').value") == "one\ntwo"
    page.run("document.activeElement.blur()")
    reached = []
    for _ in range(12):
        page.press("Tab")
        reached.append(page.run("document.activeElement.id || document.activeElement.className"))
    assert {"skip", "theme", "new", "tune", "log", "draft", "send"} <= set(reached)


def test_everything_has_a_name(page):
    ask(page, f"Say <think>a</think>{MARKDOWN}")
    page.click("#tune")
    for _ in range(2):
        page.command("Accessibility.enable")
        nodes = page.command("Accessibility.getFullAXTree")["nodes"]
        controls = {"button", "textbox", "link", "spinbutton", "combobox", "dialog", "checkbox"}
        found = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if "role" in node]
        named = [one for one in found if one[0] in controls]
        assert named and all(name for _, name in named), named
        page.press("Escape")


CONTRAST = """(() => {
  const light = (color) => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d");
    canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((value) => value / 255)
      .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const probe = document.body.appendChild(document.createElement("i"));
  const of = (name) => { probe.style.color = `var(--${name})`; return light(getComputedStyle(probe).color); };
  const ratio = (one, other) => (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  const found = {"on-accent/accent": ratio(of("on-accent"), of("accent")), dark: of("paper") < 0.1};
  for (const fore of ["ink", "soft", "accent", "bad"])
    for (const back of ["paper", "side", "card", "tint"]) found[`${fore}/${back}`] = ratio(of(fore), of(back));
  probe.remove();
  return found;
})()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_both_themes_can_be_read(page, dark):
    page.show_as(1200, 800, dark=dark)
    found = page.run(CONTRAST)
    assert found.pop("dark") is dark
    assert min(found.values()) >= 4.5, found
    for _ in range(3):  # a theme of one's own wins, and stays
        page.click("#theme")
        if page.run("document.documentElement.dataset.theme") == ("light" if dark else "dark"):
            break
    page.reload()
    assert page.run(CONTRAST)["dark"] is not dark


def test_a_phone(page):
    page.show_as(375, 667, phone=True)
    page.reload()
    ask_by_button = "document.querySelector('#send')"
    page.run("document.querySelector('#draft').focus()")
    page.type(f"Say {MARKDOWN}{'long' * 60}\n\n```\n{'wide ' * 60}\n```\n")
    page.until(f"!{ask_by_button}.disabled")
    page.click("#send")
    page.until("document.querySelector('.stats')")
    assert page.run("document.documentElement.scrollWidth <= 375 && document.querySelector('#log').scrollWidth <= 375")
    assert page.run("document.querySelector('#side').getBoundingClientRect().right <= 0")
    page.click("#menu")
    page.until("document.querySelector('#side').getBoundingClientRect().left === 0")
    page.click("#new")
    page.until("document.querySelector('#hello') && document.querySelector('#side').getBoundingClientRect().right <= 0")
    page.click("#tune")
    place = "document.querySelector('#settings .strong').getBoundingClientRect()"
    assert page.run(f"document.querySelector('#settings').scrollTop === 0 && {place}.bottom <= 667")  # without a search
    assert page.run(
        "[...document.querySelectorAll('.field')].every((one) => parseFloat(getComputedStyle(one).fontSize) >= 16)"
    )
    page.click("#settings .strong")


def test_a_long_question_names_its_conversation_by_whole_words(page):
    ask(page, "Say nothing at all about the seven grey wolves that were seen yesterday evening by the river")
    assert page.text("#title") == "Say nothing at all about the seven grey wolves that were…"
