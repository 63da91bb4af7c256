"""The process that serves, as far as no client sees it."""

import gc
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest

from halfbyte.server import process
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
