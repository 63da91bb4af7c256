"""Chat templates: rendered as transformers does, found where folders keep them, and harmless whatever they try."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from halfbyte import limits
from halfbyte.errors import CheckpointError
from halfbyte.text import confined, template
from halfbyte.text.template import TemplateError, render

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("source", "variables", "text"),
    [
        ("{% if true %}\n  a\n  {% endif %}\nb\n", {}, "  a\nb"),  # trim_blocks, lstrip_blocks, the last newline
        ("{% for x in xs %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", {"xs": [1, 2, 3]}, "13"),
        ("{% for x in xs %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", {"xs": [1, 2, 3]}, "1"),
        ("{{ x | tojson }}", {"x": {"b": "<é'&>", "a": [1.5, None, True]}}, '{"b": "<é\'&>", "a": [1.5, null, true]}'),
        ("{{ x | tojson(indent=1) }}", {"x": [1]}, "[\n 1\n]"),
        ("{{ x | tojson(ensure_ascii=true, sort_keys=true) }}", {"x": {"b": "é", "a": 1}}, '{"a": 1, "b": "\\u00e9"}'),
        ("{{ x | tojson(separators=(',', ':')) }}", {"x": {"a": 1}}, '{"a":1}'),
        ("{% set n = namespace(i=0) %}{% for x in [1, 2] %}{% set n.i = n.i + x %}{% endfor %}{{ n.i }}", {}, "3"),
        ("{% macro m(a, b='!') %}{{ a }}{{ b }}{% endmacro %}{{ m('x') }}{{ m('y', b='?') }}", {}, "x!y?"),
        ("a{% generation %}b{% endgeneration %}c", {}, "abc"),
        ("{{ x is defined }} {{ y is defined }} {{ y is none }} {{ x }}", {"y": None}, "False True True "),
        ("{{ dict(a=1)['a'] }}{{ dict.fromkeys('a')['a'] }}", {}, "1None"),
        ("{{ '%s' % 'é' }}{{ 'a-b'.split('-')[-1] }}{{ 'x' ~ 1 }}{{ [1, 2][::-1] }}", {}, "ébx1[2, 1]"),
        ("{{ {'b': 1, 'a': 2} | dictsort }}{{ {'k': 'v'} | items | list }}", {}, "[('a', 2), ('b', 1)][('k', 'v')]"),
        ("{{ strftime_now('%Y') | length }}", {}, "4"),
        ("{{ x }}", {"x": "東京 🙂 \u0000 \ufeff"}, "東京 🙂 \u0000 \ufeff"),
    ],
)
def test_templates_render_as_in_transformers(source, variables, text):
    assert render(source, variables) == text


ESCAPES = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['os'].system('touch canary') }}",
    "init": "{{ cycler.__init__.__globals__.os.popen('touch canary').read() }}",
    "joiner": "{{ joiner.__init__.__globals__ }}",
    "namespace": "{{ namespace.__init__.__globals__['sys'].modules }}",
    "namespace of dunder": "{% set n = namespace(__class__=1) %}",
    "namespace by set": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "attr filter": "{{ '' | attr('__class__') | attr('__mro__') }}",
    "attr of format": "{{ ('{0.__class__}' | attr('format'))('') }}",
    "format string": "{{ '{0.__class__.__mro__}'.format('') }}",
    "format map": "{{ '{a.__class__}'.format_map({'a': ''}) }}",
    "format filter": "{{ '%s' | format(''.__class__) }}",
    "subscript": "{{ ''['__class__'] }}",
    "map attribute": "{{ [''] | map(attribute='__class__') | list }}",
    "macro": "{% macro m() %}{% endmacro %}{{ m.__call__.__func__.__globals__ }}",
    "self": "{{ self.__init__.__globals__ }}",
    "self context": "{{ self._TemplateReference__context }}",
    "generator frame": "{{ (x for x in [1]).gi_frame }}",
    "lipsum": "{{ lipsum.__globals__['os'].system('touch canary') }}",
    "dict type": "{{ dict.__class__.__bases__ }}",
    "loop": "{% for x in [1] %}{{ loop.__class__ }}{% endfor %}",
    "change of a list": "{{ messages.append(1) }}",
    "change of a dict": "{{ messages[0].update(a=1) }}",
    "include": "{% include 'canary' %}",
    "import": "{% import 'os' as os %}{{ os.system('touch canary') }}",
    "extends": "{% extends '/etc/passwd' %}",
    "open": "{{ open('canary', 'w') }}",
    "strftime": "{{ strftime_now.__globals__['os'] }}",
}


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES)
def test_row_27_a_sandbox_escape_is_an_error_without_effect(source, tmp_path, monkeypatch):
    """An attribute that the sandbox hides is undefined, so an escape fails, or prints nothing of the inside."""
    monkeypatch.chdir(tmp_path)
    try:
        text = render(source, {"messages": [{}]})
    except TemplateError:
        text = ""
    assert not any(inside in text for inside in ("<class", "<module", "<function", "{'", "frame"))
    assert list(tmp_path.iterdir()) == []


def another():
    """A worker with the limits of the one that all share."""
    one = template.worker
    return confined.Worker("template_worker.py", one.seconds, one.memory, one.output, one.absent)


def test_row_27_the_worker_can_open_nothing_and_sees_no_secrets(monkeypatch):
    """What a template that broke out would find."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    worker = another()
    try:
        worker.start()
        process = Path(f"/proc/{worker.process.pid}")
        assert b"secret" not in (process / "environ").read_bytes()
        allowed = {line[:26].strip(): line[26:].split()[1] for line in (process / "limits").read_text().splitlines()}
        assert allowed["Max open files"] == "3"
        assert allowed["Max processes"] == allowed["Max file size"] == allowed["Max core file size"] == "0"
    finally:
        worker.stop()


def test_row_27_modules_in_the_current_folder_are_not_imported(tmp_path):
    """`cd model && halfbyte chat .` must not run the folder's jinja2.py."""
    for name in ("jinja2", "json", "template_worker", "confinement", "datetime"):
        (tmp_path / f"{name}.py").write_text("open('canary', 'w')\n")
    code = "import os, sys\nfrom halfbyte.text.template import render\nos.chdir(sys.argv[1])\nprint(render('ok', {}))"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "ok\n", done.stderr
    assert not (tmp_path / "canary").exists()


def test_the_worker_leaves_nothing_beside_its_sources(tmp_path):
    folder = shutil.copytree(Path(confined.__file__).parent, tmp_path / "text", ignore=shutil.ignore_patterns("__*"))
    before, worker = sorted(folder.iterdir()), another()
    worker.script = folder / "template_worker.py"
    try:
        assert worker.ask(template="{{ 1 + 1 }}", variables={})["text"] == "2"
    finally:
        worker.stop()
    assert sorted(folder.iterdir()) == before


BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "product": "{{ 'a' * 20000000000 }}",
    "products in a loop": "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s * 9 %}{% endfor %}",
    "replace": "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s.replace('a', s) %}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "width": "{{ '%99999999999d' % 1 }}",
    "centre": "{{ 'a' | center(99999999999) }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "range": "{{ range(999999999) | list }}",
    "list": "{{ [[0] * 99999999] * 99999999 }}",
    "output": "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "brackets": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "blocks": "{% if 1 %}" * 5_000,
    "sum": "{{ [[1] * 9999] * 9999 | sum(start=[]) }}",
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS)
def test_row_28_a_bomb_is_an_error_within_its_limits(source, monkeypatch):
    monkeypatch.setattr(limits, "TEMPLATE_SECONDS", 0.5)
    with pytest.raises(TemplateError, match="The chat template failed: "):
        render(source, {"s": "aa"})
    assert render("{{ 1 + 1 }}", {}) == "2"


@pytest.mark.quiet
def test_row_28_a_bomb_is_killed_after_two_seconds():
    render("", {})  # it runs
    started = time.monotonic()
    with pytest.raises(TemplateError, match="it takes longer than 2 s"):
        render(BOMBS["nested loops"], {})
    assert 2 <= time.monotonic() - started < 3


def test_row_28_memory_stays_within_its_limit():
    """The last thing a worker does is what took too much; until then it may take what is allowed."""
    worker = another()
    try:
        worker.start()
        status = Path(f"/proc/{worker.process.pid}/status")

        def peak():
            lines = status.read_text().splitlines()
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

        before = peak()
        hoard = "{% for i in range(megabytes) %}{% set n.s = n.s + ['a' * (1000000 + i)] %}{% endfor %}"
        ask = {"template": "{% set n = namespace(s=[]) %}" + hoard, "seconds": 20, "output": 9}
        for megabytes, said in ((200, {"text": ""}), (999, {"error": "it takes too much memory", "spent": "yes"})):
            request = {**ask, "variables": {"megabytes": megabytes}}
            assert worker._exchange(json.dumps(request).encode(), 20) == said
        assert 190_000_000 < peak() - before < limits.TEMPLATE_MEMORY
    finally:
        worker.stop()


def test_row_28_output_up_to_the_limit_is_given():
    assert len(render("{{ 'a' * n }}", {"n": limits.TEMPLATE_OUTPUT})) == limits.TEMPLATE_OUTPUT
    with pytest.raises(TemplateError, match="more than 16 MB"):
        render("{{ 'é' * n }}", {"n": limits.TEMPLATE_OUTPUT // 2 + 1})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('Only two roles.') }}", "The chat template failed: Only two roles."),
        ("{% if %}", "line 1: Expected an expression"),
        ("\n\n{% endfor %}", "line 3"),
        ("{{ nothing.field }}", "'nothing' is undefined"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ x | nofilter }}", "No filter named 'nofilter'"),
    ],
)
def test_row_29_a_template_that_raises_says_what(source, said):
    with pytest.raises(TemplateError) as raised:
        render(source, {})
    assert said in str(raised.value)


@pytest.mark.parametrize("variables", [{"x": object()}, {"x": {1, 2}}, {"x": b"bytes"}], ids=["object", "set", "bytes"])
def test_variables_must_be_json(variables):
    with pytest.raises(TemplateError, match="cannot be given to the chat template"):
        render("", variables)


def test_variables_that_hold_themselves_are_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(TemplateError, match="cannot be given to the chat template"):
        render("", {"x": loop})


def test_a_worker_starts_fast_and_loads_nothing_heavy():
    """Under 0.3 s of processor time, the best of three; a busy machine takes longer by the clock."""
    times, worker = [], another()
    for _ in range(3):
        before = os.times()
        worker.start()
        mapped = Path(f"/proc/{worker.process.pid}/maps").read_text()
        worker.stop()
        after = os.times()
        times.append(sum(after[2:4]) - sum(before[2:4]))
        assert "torch" not in mapped and "numpy" not in mapped
    assert 0 < min(times) < 0.3


def test_a_worker_that_died_is_replaced():
    render("", {})
    dead = template.worker.process.pid
    os.kill(dead, signal.SIGKILL)
    template.worker.process.wait()
    assert render("ok", {}) == "ok"
    assert template.worker.process.pid != dead


def test_a_worker_ends_with_its_caller_even_in_the_middle_of_a_bomb():
    code = (
        "import os, threading, time\nfrom halfbyte.text import template\n"
        "template.render('', {})\nprint(template.worker.process.pid, flush=True)\n"
        f"source = {BOMBS['nested loops']!r}\n"
        "threading.Timer(0.3, os._exit, [0]).start()\ntemplate.render(source, {})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    worker = int(done.stdout)
    deadline = time.monotonic() + limits.TEMPLATE_SECONDS + 4
    while Path(f"/proc/{worker}").exists() and "Z" not in Path(f"/proc/{worker}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_interrupted_rendering_leaves_no_answer_for_the_next(monkeypatch):
    render("", {})
    read, worker = json.loads, template.worker

    def interrupted(data):
        monkeypatch.setattr(confined.json, "loads", read)
        raise KeyboardInterrupt

    monkeypatch.setattr(confined.json, "loads", interrupted)
    with pytest.raises(KeyboardInterrupt):
        render("first", {})
    assert worker.process is None
    assert render("second", {}) == "second"


def test_threads_get_their_own_answers():
    wrong = []

    def work(number):
        wrong.extend(i for i in range(20) if render("{{ x }}", {"x": [number, i]}) != f"[{number}, {i}]")

    threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_child_does_not_speak_into_its_parents_pipes():
    render("", {})
    child = os.fork()
    if child == 0:
        same = template.worker.process.pid
        answer = render("child", {}) == "child" and template.worker.process.pid != same
        template.worker.stop()
        os._exit(0 if answer else 1)
    assert render("parent", {}) == "parent"
    assert os.waitpid(child, 0)[1] == 0
    assert render("parent", {}) == "parent"


def test_row_29_where_templates_are_found(tmp_path):
    """The first of: chat_template.jinja, tokenizer_config.json (a string or a list), chat_template.json."""
    assert template.find(tmp_path, {}) == {}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "old"}))
    assert template.find(tmp_path, {}) == {"default": "old"}
    assert template.find(tmp_path, {"chat_template": "config"}) == {"default": "config"}
    assert template.find(tmp_path, {"chat_template": " \n"}) == {}, "an empty one is none"
    both = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert template.find(tmp_path, {"chat_template": both}) == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("file é\n", encoding="utf-8")
    assert template.find(tmp_path, {"chat_template": "config"}) == {"default": "file é\n"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    assert template.find(tmp_path, {}) == {"default": "file é\n", "rag": "rag"}


@pytest.mark.parametrize("given", [7, [1], [{"name": "a"}], [{"name": "a", "template": 3}], {"a": "b"}], ids=str)
def test_row_29_a_template_that_is_no_text_is_refused(given, tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: chat_template: a string or a list"):
        template.find(tmp_path, {"chat_template": given})


def test_row_29_a_template_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="not UTF-8 at byte 0"):
        template.find(tmp_path, {})
