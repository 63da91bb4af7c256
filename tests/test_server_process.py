"""The process that serves, as far as no client sees it."""

import gc
import sys
import threading
import weakref
from collections import Counter
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from halfbyte.server import process
from halfbyte.server.app import Api
from halfbyte.server.settings import Settings


class Node:
    """Something that can lie in a circle, and tells when it is gone."""


@pytest.fixture(autouse=True)
def collections_as_before():
    interval = sys.getswitchinterval()
    yield
    gc.unfreeze()
    sys.setswitchinterval(interval)


def test_collections_while_serving_leave_out_what_was_loaded(monkeypatch):
    loaded, rubbish = Node(), Node()
    rubbish.itself = rubbish
    gone, looked_at = weakref.ref(rubbish), []
    del rubbish

    def run(self, sockets):
        young = Node()
        for one in (loaded, young):
            looked_at.append(any(found is one for found in gc.get_objects()))

    monkeypatch.setattr(process.Process, "run", run)
    service = SimpleNamespace(settings=Settings(), scheduler=SimpleNamespace(thread=threading.Thread()))
    assert process.serve(None, service, None, []) == 0
    assert looked_at == [False, True]
    assert gone() is None, "rubbish is not kept for ever"


def test_numbers_are_read_while_they_change():
    aborts = Counter()

    class Reason(str):
        def __hash__(self):  # something else ends whenever this one is looked at
            dict.__setitem__(aborts, f"other {len(aborts)}", 1)
            return str.__hash__(self)

    aborts.update({Reason("disconnect"): 2, "error": 1})
    api = Api.__new__(Api)
    api.requests, api.service = Counter(), MagicMock()
    api.service.scheduler.aborts, api.service.model.residency = aborts, None
    _, found = api._numbers()["aborts_total"]
    assert found[(("reason", "disconnect"),)] == 2 and found[(("reason", "error"),)] == 1
