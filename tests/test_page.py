"""The page as it is served and written: what can be known without a browser (test_page_browser.py has one)."""

import re
from html.parser import HTMLParser

import pytest
from serving import serving

from halfbyte.server.page import INLINE, Page, policy

TEXT = Page().text
SCRIPT = next(inside for kind, inside in INLINE.findall(TEXT) if kind == "script")
KEY = "key-of-the-tests"
# What browsers have and the page calls by its bare name.
BROWSERS = {"Number", "String", "clearInterval", "clearTimeout", "fetch", "matchMedia", "parseInt",
            "requestAnimationFrame", "setInterval", "setTimeout"}  # fmt: skip

LITERAL = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.S)
PATTERN = re.compile(r"/(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\[\n])+/[a-z]*")
TEMPLATE = re.compile(r"(?:\\.|\$(?!\{)|[^`\\$])*", re.S)
CLOSES = {")": "(", "]": "[", "}": "{"}


def code(script):
    """A script with each comment as a blank and each text and pattern as `""`; what is opened must be closed."""
    made, opened, at = "", [], 0
    while at < len(script):
        sign = script[at]
        if opened and opened[-1] == "`":  # in the text of a template
            at = TEMPLATE.match(script, at).end() + 1
            assert at <= len(script), "a template does not end"
            if script[at - 1] == "`":
                opened.pop()
            else:
                opened.append("{")
                at += 1
                made += " {"
            continue
        pattern = sign == "/" and re.search(r"([(,=:\[!&|?{};>]|return)\s*$", made)
        if found := LITERAL.match(script, at) or (pattern and PATTERN.match(script, at)):
            made += " " if found[0][:2] in ("//", "/*") else '""'
            at = found.end()
            continue
        assert sign not in "\"'", f"a text does not end: {script[at : at + 40]!r}"
        if sign in "([{`":
            opened.append(sign)
        elif sign in CLOSES:
            assert opened and opened.pop() == CLOSES[sign], f"unopened: {script[at - 40 : at + 1]!r}"
        made += '""' if sign == "`" else sign
        at += 1
    assert not opened, f"not closed: {opened}"
    return made


class Elements(HTMLParser):
    """Every element, with its attributes and the text inside it."""

    def __init__(self, text):
        super().__init__()
        self.all, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.all.append((tag, dict(attributes), []))
        self.open.append(self.all[-1])

    def handle_endtag(self, tag):
        while self.open.pop()[0] != tag:  # those that need no end, as <input>
            pass

    def handle_data(self, data):
        for _, _, inside in self.open:
            inside.append(data.strip())


ELEMENTS = Elements(TEXT).all


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), key=KEY) as running:
        yield running


def test_it_is_served_without_a_key_and_allows_nothing_but_itself(server):
    response = server.http.get("/", headers={"Authorization": ""})
    assert response.status_code == 200 and response.text == TEXT
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    allowed = response.headers["content-security-policy"]
    assert allowed == policy(TEXT) and "unsafe" not in allowed and "default-src 'none'" in allowed
    assert len(re.findall("'sha256-", allowed)) == 2 and "trusted-types 'none'" in allowed
    assert "connect-src 'self'" in allowed and "frame-ancestors 'none'" in allowed
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert server.http.get("/v1/models", headers={"Authorization": ""}).status_code == 401
    assert f"The page to chat on: {server.address}/\n" in server.log


def test_its_one_file_asks_nobody_else():
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|@import|url\(", TEXT)
    addresses = set(re.findall(r"https?://[\w.]+", TEXT))
    assert addresses == {"http://www.w3.org"}  # the name of SVG, which nobody fetches
    assert set(re.findall(r"""(?:fetch|call)\("([^"]*)""", SCRIPT)) == {"v1/chat/completions", "v1/models"}
    for tag, attributes, _ in ELEMENTS:
        assert tag not in {"base", "iframe", "img", "object", "embed"}
        assert attributes.get("href", "#").startswith(("#", "data:")) and not {"src", "srcset", "action"} & set(
            attributes
        )


def test_its_policy_lets_it_work():
    """Inline handlers and styles would be refused by the browser, and a second script would need a hash of its own."""
    assert [kind for kind, _ in INLINE.findall(TEXT)] == ["style", "script"]
    assert re.findall(r"<(?:script|style)\b[^>]*>", TEXT) == ["<style>", "<script>"]
    assert not [
        name for _, attributes, _ in ELEMENTS for name in attributes if name == "style" or name.startswith("on")
    ]


def test_every_part_that_is_asked_for_is_there():
    ids = [attributes["id"] for _, attributes, _ in ELEMENTS if "id" in attributes]
    assert len(ids) == len(set(ids))
    made = set(re.findall(r'\bid: "([\w-]+)"', SCRIPT))
    assert set(re.findall(r'[$(]\("#([\w-]+)', SCRIPT)) <= {*ids, *made}
    named = {
        attributes[name]
        for _, attributes, _ in ELEMENTS
        for name in attributes
        if name in {"aria-labelledby", "aria-controls"}
    }
    drawn = {attributes["href"][1:] for tag, attributes, _ in ELEMENTS if tag == "use"}
    drawn |= {f"i-{name}" for name in re.findall(r'\b(?:icon|button)\("(\w+)"', SCRIPT)}
    assert named | drawn <= set(ids) and len(drawn) > 10


def test_every_control_has_a_name():
    for tag, attributes, inside in ELEMENTS:
        if tag == "button" and attributes.get("id") != "theme":  # whose name says which theme, by the script
            assert attributes.get("aria-label") or "".join(inside), attributes
        assert tag != "label" or "".join(inside)
    assert ELEMENTS[0][:2] == ("html", {"lang": "en"})
    assert any(attributes.get("name") == "viewport" for _, attributes, _ in ELEMENTS)


def test_its_script_is_whole():
    written = code(SCRIPT)
    called = set(re.findall(r"(?<![\w.$])(?<!new )([A-Za-z_]\w*)\(", written))
    values = set(re.findall(r"\b([A-Za-z_]\w*)\b(?!\()", written))
    defined = set(
        re.findall(r"\b(\w+)\([^()]*(?:\([^()]*\)[^()]*)*\) \{", written)
    )  # functions, methods, and words as if
    assert called - values - defined <= BROWSERS and len(called) > 50


@pytest.mark.parametrize("lost", ["}", ")", "`", '"', "function say(text)"])
def test_a_script_that_lost_something_is_not_whole(lost, monkeypatch):
    at = SCRIPT.rindex(lost)
    monkeypatch.setitem(globals(), "SCRIPT", SCRIPT[:at] + SCRIPT[at + len(lost) :])
    with pytest.raises(AssertionError):
        test_its_script_is_whole()
