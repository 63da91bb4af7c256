"""Rows 59 to 62 of the plan of faults: kills, two at once, full disks, targets that cannot be."""

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import QWEN3

from halfbyte.conversion import convert, planning, saving
from halfbyte.errors import StorageError
from halfbyte.loading import load_model

KILLS = 200 if os.environ.get("HALFBYTE_SOAK") else 10
# A process that has imported everything, and of which others are forked in no time.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["halfbyte.conversion", "pytest", "hypothesis", "safetensors.torch"])


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Parallel regions of tiny work take longer than the work where other processes run too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A small dense model as Hugging Face has it."""
    H, D, I, V = 256, 32, 512, 1000  # noqa: E741
    config = {**QWEN3, "hidden_size": H, "intermediate_size": I, "vocab_size": V}
    layer = {
        "self_attn.q_proj": (6 * D, H), "self_attn.k_proj": (2 * D, H), "self_attn.v_proj": (2 * D, H),
        "self_attn.o_proj": (H, 6 * D), "self_attn.q_norm": (D,), "self_attn.k_norm": (D,), "mlp.gate_proj": (I, H),
        "mlp.up_proj": (I, H), "mlp.down_proj": (H, I), "input_layernorm": (H,), "post_attention_layernorm": (H,),
    }  # fmt: skip
    shapes = {"embed_tokens": (V, H), "norm": (H,)}
    shapes |= {f"layers.{n}.{name}": shape for n in range(2) for name, shape in layer.items()}
    draw = torch.Generator().manual_seed(0)
    tensors = {f"model.{name}.weight": torch.randn(shape, generator=draw).bfloat16() for name, shape in shapes.items()}
    folder = tmp_path_factory.mktemp("source")
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


@pytest.fixture(scope="module")
def wanted(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wanted") / "result"
    convert(source, folder, dtype="float32")
    return contents(folder)


def in_pieces(source, target):
    """In many steps, so that there are many moments to die at."""
    planning.CHUNK = 1 << 12
    convert(source, target, dtype="float32")


def start(*args, target=in_pieces):
    process = PROCESSES.Process(target=target, args=args)
    process.start()
    return process


def ended(process):
    process.join()
    return process.exitcode


def assert_absent_or_complete(target, wanted):
    assert not target.exists() or contents(target) == wanted


LASTING = ("mkdir", "pwrite", "fsync", "rename", "unlink", "rmdir")  # calls by which something changes on the disk


def counted(setattr, lasting):
    """Call `lasting` with a number before each such call of the system."""
    count = [0]

    def wrap(call):
        def wrapped(*args, **kwargs):
            lasting(count[0])
            count[0] += 1
            return call(*args, **kwargs)

        return wrapped

    for name in LASTING:
        setattr(os, name, wrap(getattr(os, name)))
    return count


def convert_and_die(at, source, target):
    counted(setattr, lambda count: count == at and os.kill(os.getpid(), signal.SIGKILL))
    in_pieces(source, target)


def convert_with_little_space(source, target):
    """A file that may not grow stands for a full disk: the system refuses a write in the middle."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    try:
        in_pieces(source, target)
    except StorageError as error:
        said = "model.safetensors: File too large. What was written has been removed."
        sys.exit(error.exit_code if str(error).endswith(said) else str(error))


def test_row_59_kill_at_random_times(source, wanted, tmp_path):
    target, took = tmp_path / "result", []
    for _ in range(2):  # the first one starts the server of processes
        shutil.rmtree(target, ignore_errors=True)
        before = time.perf_counter()
        assert ended(start(source, target)) == 0
        took.append(time.perf_counter() - before)
        assert contents(target) == wanted
    draw, unfinished = random.Random(59), 0
    for _ in range(KILLS):
        shutil.rmtree(target, ignore_errors=True)
        process = start(source, target)
        time.sleep(draw.uniform(0.1, 1) * took[1])
        process.kill()
        process.join()
        assert_absent_or_complete(target, wanted)
        unfinished += not target.exists()
    shutil.rmtree(target, ignore_errors=True)
    convert(source, target, dtype="float32")
    assert contents(target) == wanted and list(tmp_path.iterdir()) == [target]
    assert unfinished > 0


def test_row_59_kill_at_calls_of_the_system(source, wanted, tmp_path, monkeypatch):
    """Before anything is there, between writes, around the rename."""
    target, outcomes = tmp_path / "result", []
    monkeypatch.setattr(planning, "CHUNK", 1 << 12)
    last = counted(monkeypatch.setattr, lambda count: None)
    convert(source, target, dtype="float32")
    monkeypatch.undo()
    for at in range(last[0]) if KILLS > 10 else [0, 1, 2, 5, last[0] // 2, *range(last[0] - 5, last[0])]:
        for left in tmp_path.iterdir():
            shutil.rmtree(left)
        assert ended(start(at, source, target, target=convert_and_die)) == -signal.SIGKILL
        assert_absent_or_complete(target, wanted)
        outcomes.append(target.exists())
    assert outcomes == [False] * (len(outcomes) - 1) + [True]  # only the last call comes after the rename
    assert list(tmp_path.iterdir()) == [target]


def test_row_59_leftovers_of_the_dead_are_reclaimed(source, wanted, tmp_path):
    left = tmp_path / ".tmp-halfbyte-result"
    (left / "additional_chat_templates").mkdir(parents=True)
    (left / "model-00001-of-00009.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-halfbyte-other").mkdir()  # of another target, perhaps of another program
    convert(source, tmp_path / "result", dtype="float32")
    assert contents(tmp_path / "result") == wanted
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-halfbyte-other", "result"]


def test_row_59_a_link_in_their_place_is_not_followed(source, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("kept")
    (tmp_path / ".tmp-halfbyte-result").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError, match="it is in the way"):
        convert(source, tmp_path / "result")
    assert contents(tmp_path / "precious") == {"file": b"kept"}


def test_row_59_an_interrupt_leaves_nothing(source, tmp_path):
    def interrupt(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "result", dtype="float32", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_row_60_the_second_of_two_says_so(source, wanted, tmp_path):
    """And leaves the first alone."""
    target, said = tmp_path / "result", []

    def meanwhile(done, total):
        if not said:
            with pytest.raises(StorageError, match="another process is writing it") as caught:
                convert(source, target, dtype="float32")
            said.append(caught.value.exit_code)
            said.append(ended(start(source, target)))

    convert(source, target, dtype="float32", progress=meanwhile)
    assert said == [5, 1]
    assert contents(target) == wanted and list(tmp_path.iterdir()) == [target]


def test_row_60_many_at_once(source, wanted, tmp_path):
    target = tmp_path / "result"
    processes = [start(source, target) for _ in range(4)]
    assert sorted(map(ended, processes)) == [0, 1, 1, 1]
    assert contents(target) == wanted and list(tmp_path.iterdir()) == [target]


def test_row_61_a_full_disk_is_seen_before_anything_is_written(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda folder: usage._replace(free=10_000))
    with pytest.raises(StorageError, match=r"the result needs \d.* MB of disk space, and 10.0 kB are free there"):
        convert(source, tmp_path / "result", dtype="float32")
    assert list(tmp_path.iterdir()) == []


def test_row_61_a_disk_that_fills_up(source, tmp_path):
    assert ended(start(source, tmp_path / "result", target=convert_with_little_space)) == 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename"])
def test_row_61_the_system_refuses(call, source, tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving.os, call, refuse)
    with pytest.raises(StorageError, match=r"No space left on device\. What was written has been removed"):
        convert(source, tmp_path / "result", dtype="float32")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_row_61_short_writes_are_continued(source, wanted, tmp_path, monkeypatch):
    whole = os.pwrite
    monkeypatch.setattr(saving.os, "pwrite", lambda file, data, at: whole(file, data[:999], at))
    monkeypatch.setattr(planning, "CHUNK", 1 << 14)
    convert(source, tmp_path / "result", dtype="float32")
    assert contents(tmp_path / "result") == wanted
    load_model(tmp_path / "result")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("there", "exists already"), ("file", "exists already"), ("link", "exists already"), ("alias", "is the source"),
        ("{source}", "is the source"), ("{source}/result", "lies inside the source"), ("no/result", "is not a folder"),
        ("alias/result", "lies inside the source"), ("file/result", "is not a folder"), ("/sys/result", "not writable"),
        ("/proc/result", "not writable"),
    ],
)  # fmt: skip
def test_row_62_targets_that_cannot_be(name, said, source, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "alias").symlink_to(source)
    target = tmp_path / name.format(source=source)
    before = sorted(tmp_path.rglob("*")), contents(source)
    with pytest.raises(ValueError, match=said) as caught:
        convert(source, target, dtype="float32")
    assert not isinstance(caught.value, OSError)
    assert before == (sorted(tmp_path.rglob("*")), contents(source))
