"""Reading, mapping and memory: faults of disks and of people, rows 52 and 55 to 58 of the fault plan among them."""

import errno
import mmap
import os
import resource
import shutil
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import checkpoint_files as made
import pytest
import torch
from checkpoint_files import H, load, save, skeleton, tensors
from safetensors.torch import save_file
from streaming import TINY

from halfbyte import bench_load, checkpoint, memory
from halfbyte.checkpoint import descriptors, mapping, reading
from halfbyte.cli import main
from halfbyte.engine import Engine, Request, logits
from halfbyte.errors import CheckpointError, NotEnoughMemory, StorageError, UsageError
from halfbyte.loading import load_model

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "model")


def every_span(folder):
    weights = checkpoint.open(folder).weights("meta")
    return weights.ledger.checkpoint.states, [weights.ledger.span(name) for name in weights.ledger.checkpoint.tensors]


def agrees(found, stored):
    return all(
        torch.equal(found[name.removeprefix("model.")].view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in stored.items()
    )


@pytest.mark.parametrize("batch", [1, 7, 64, 1000, 1 << 20])
@pytest.mark.parametrize("buffers", [1, 3, 512])
def test_any_cutting_gives_the_same_bytes(folder, monkeypatch, batch, buffers):
    monkeypatch.setattr(reading, "BATCH", max(batch, 64) if buffers == 512 else batch * 50)
    monkeypatch.setattr(reading, "BUFFERS", buffers)
    assert agrees(reading.read(*every_span(folder), CPU), tensors())


def test_neighbours_are_read_in_one_call(folder, monkeypatch):
    calls, spans = [], every_span(folder)
    monkeypatch.setattr(os, "preadv", lambda fd, views, at, real=os.preadv: calls.append(at) or real(fd, views, at))
    reading.read(*spans, CPU)
    assert len(calls) == 1


def test_staged_reads(folder, monkeypatch):
    """What feeds a GPU, with the CPU as the device."""
    monkeypatch.setattr(reading, "BATCH", 1 << 10)
    monkeypatch.setattr(reading, "direct", partial(reading.staged, CPU))
    assert agrees(reading.read(*every_span(folder), CPU), tensors())


def test_row_57_interrupts_and_short_reads(folder, monkeypatch):
    turns = iter(range(10**9))

    def stutter(fd, views, at, real=os.preadv):
        if next(turns) % 3 == 0:
            raise InterruptedError
        return real(fd, [views[0][:13]], at)

    monkeypatch.setattr(os, "preadv", stutter)
    assert agrees(reading.read(*every_span(folder), CPU), tensors())


def test_row_57_a_disk_that_fails(folder, monkeypatch):
    def fail(fd, views, at):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    weights = skeleton(folder)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StorageError, match=r"model\.safetensors: reading at byte \d+: Input/output error") as caught:
        weights.load("cpu")
    assert caught.value.exit_code == 5


def test_row_56_cut_while_it_is_read(folder, monkeypatch):
    path = folder / "model.safetensors"
    half = path.stat().st_size // 2

    def cut(fd, views, at, real=os.preadv):
        os.truncate(path, half)
        return real(fd, views, at)

    weights = skeleton(folder)
    monkeypatch.setattr(os, "preadv", cut)
    with pytest.raises(CheckpointError, match=rf"it ends at byte {half}; tensor '.*' needs \d+. Download it again"):
        weights.load("cpu")


def test_row_56_changed_after_it_was_checked(folder, monkeypatch):
    """Nothing is read of it."""
    weights = skeleton(folder)
    monkeypatch.setattr(os, "preadv", None)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    for how in ("read", "map"):
        with pytest.raises(CheckpointError, match="changed after it had been checked"):
            weights.load("cpu", load=how)


def test_row_56_changed_while_it_is_read(folder, monkeypatch):
    def touch(fd, views, at, real=os.preadv):
        os.utime(folder / "model.safetensors", ns=(1, 1))
        return real(fd, views, at)

    weights = skeleton(folder)
    monkeypatch.setattr(os, "preadv", touch)
    with pytest.raises(CheckpointError, match="changed after it had been checked"):
        weights.load("cpu")


def test_row_55_deleted_while_it_is_read(folder, monkeypatch):
    def delete(fd, views, at, real=os.preadv):
        (folder / "model.safetensors").unlink(missing_ok=True)
        return real(fd, views, at)

    weights = skeleton(folder)
    monkeypatch.setattr(os, "preadv", delete)
    assert torch.equal(made.Toy(weights.load("cpu")).norm, made.weight(H))


def test_deleted_after_it_was_checked(folder):
    weights = skeleton(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(StorageError, match="No such file"):
        weights.load("cpu")


def test_an_error_stops_the_other_threads(folder, monkeypatch):
    calls = []

    def fail(fd, views, at):
        calls.append(at)
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(reading, "BATCH", 64)
    weights = skeleton(folder)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StorageError):
        weights.load("cpu")
    assert len(calls) <= 2 * reading.THREADS


@contextmanager
def limited(kind, most):
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def test_row_58_more_shards_than_descriptors(tmp_path):
    folder = save(tmp_path, stored={"model.norm.weight": torch.zeros(1)})
    (folder / "model.safetensors").unlink()
    stored = {f"model.x.{i}": torch.full((5,), float(i)) for i in range(159)}
    for i, (name, tensor) in enumerate(stored.items()):
        save_file({name: tensor}, folder / f"model-{i + 1:05d}-of-00159.safetensors")
    with limited(resource.RLIMIT_NOFILE, 64):
        assert agrees(reading.read(*every_span(folder), CPU), stored)


def test_descriptors_are_few_and_closed(folder, tmp_path):
    states, _ = every_span(folder)
    (path,) = states
    others = {}
    for i in range(5):
        other = tmp_path / str(i)
        other.write_bytes(b"x")
        others[other] = descriptors.State.of(other.stat())
    before = len(os.listdir("/proc/self/fd"))
    with descriptors.Descriptors(states | others, most=2) as opened, opened.open(path) as first:
        for other in others:
            with opened.open(other):
                pass
        assert len(opened.opened) == 2
        with opened.open(path) as again:
            assert again == first
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_map_is_the_file(tmp_path):
    """No copy, nothing written, and it outlives the folder's name."""
    stored = {"model.norm.weight": made.weight(1 << 20)}
    folder = save(tmp_path / "m", stored)
    weights = checkpoint.open(folder).weights("meta")
    weights.tensor("norm.weight", 1 << 20)
    weights.finish()
    found = weights.load("cpu", load="map").tensor("norm.weight", 1 << 20)
    (folder / "model.safetensors").unlink()
    assert torch.equal(found, stored["model.norm.weight"])
    address = found.data_ptr()
    regions = [line for line in Path("/proc/self/maps").read_text().splitlines() if "model.safetensors" in line]
    spans = [[int(edge, 16) for edge in line.split()[0].split("-")] for line in regions]
    assert any(low <= address < high for low, high in spans)
    assert all(line.split()[1].startswith("r-") for line in regions)


def test_a_map_that_is_written_into_is_not_computed_with(tmp_path):
    """Other bytes of the same size: weights would be others from one step to the next."""
    folder = shutil.copytree(TINY, tmp_path / "m")
    model = load_model(folder, load="map")
    engine = Engine(model, model.new_cache(1, 40))
    engine.submit(Request([1, 2, 3], 20))
    for _ in range(5):
        assert engine.step()
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-100_000, os.SEEK_END)
        file.write(os.urandom(100_000))
    for compute in (engine.step, lambda: logits(model, [1, 2, 3])):
        with pytest.raises(CheckpointError, match=r"model\.safetensors: it was changed after it had been checked"):
            compute()


def test_a_map_of_a_deleted_file_goes_on(tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "m")
    model = load_model(folder, load="map")
    before, _ = logits(model, [1, 2, 3])
    shutil.rmtree(folder)
    assert torch.equal(logits(model, [1, 2, 3])[0], before)


def test_a_map_of_a_shared_file_is_refused(folder, monkeypatch, tmp_path):
    device = (folder / "config.json").stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    (tmp_path / "mounts").write_text(f"1 1 {number} / /x rw shared:1 - nfs4 server:/x rw\n")
    monkeypatch.setattr(mapping, "MOUNTS", tmp_path / "mounts")
    with pytest.raises(CheckpointError, match="it lies on nfs4, where a file may change under a map"):
        load(folder, load="map")


def test_row_58_a_map_of_too_many_shards(tmp_path):
    """A map keeps its descriptor, so this is refused rather than served from a few."""
    folder = save(tmp_path, stored={"model.norm.weight": torch.zeros(1)})
    for i in range(80):
        save_file({f"model.x.{i}": torch.zeros(5)}, folder / f"model-{i}.safetensors")
    with limited(resource.RLIMIT_NOFILE, 64):
        states, spans = every_span(folder)
        with pytest.raises(StorageError, match=r"it cannot be mapped: Too many open files\. Load without a map"):
            mapping.map_files(states, spans)


def test_row_58_maps_that_leave_no_descriptors_to_watch_their_files_by(tmp_path):
    folder = save(tmp_path, stored={"model.norm.weight": torch.zeros(1)})
    for i in range(40):
        save_file({f"model.x.{i}": torch.zeros(5)}, folder / f"model-{i}.safetensors")
    states, spans = every_span(folder)
    maps = mapping.map_files(states, spans)
    with (
        limited(resource.RLIMIT_NOFILE, 64),
        pytest.raises(StorageError, match=r"files\. Load without a map, or allow"),
    ):
        mapping.Guard(states)
    assert mapping.Guard(states) and maps


def test_a_map_is_for_the_cpu(folder, monkeypatch, capsys):
    with pytest.raises(UsageError, match=r"\(map\) are for the CPU, not for cuda"):
        skeleton(folder).load("cuda", load="map")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # the best there is, where no --device is given
    assert main(["generate", "tiny", "-p", "x", "--load", "map"]) == 2
    said = capsys.readouterr().err
    assert "not for cuda" in said and "--device cpu" in said and "--load read" in said and said.count("\n") == 1


@pytest.mark.parametrize("how", ["read", "map"])
def test_row_52_not_enough_memory_is_said_before_anything_is_taken(folder, monkeypatch, how):
    weights = skeleton(folder)
    monkeypatch.setattr(memory, "available", lambda device: 1000)
    monkeypatch.setattr(reading, "allocate", None)
    monkeypatch.setattr(mmap, "mmap", None)
    with pytest.raises(
        NotEnoughMemory, match=r"loading it needs 47\.6 kB on cpu, and 1\.0 kB are free there"
    ) as caught:
        weights.load("cpu", load=how)
    assert caught.value.exit_code == 4


def test_row_52_an_address_space_smaller_than_the_file(tmp_path):
    """The file is sparse; it is checked by its header, and refused for the memory that it would take."""
    count = 3 << 30
    save(tmp_path)
    made.raw(tmp_path / "model.safetensors", {"model.norm.weight": made.entry(0, count, [2, count // 4], "BF16")})
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.truncate(file.tell() + count)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    with limited(resource.RLIMIT_AS, used + (1 << 30)):
        weights = checkpoint.open(tmp_path).weights("meta")
        weights.tensor("norm.weight", 2, count // 4)
        weights.finish()
        with pytest.raises(NotEnoughMemory, match=r"needs 3\.2 GB on cpu, and 1\.\d GB are free there"):
            weights.load("cpu")


def test_plan(folder):
    weights = skeleton(folder)
    assert weights.plan("cpu") == {CPU: weights.size}
    assert weights.plan("cuda") == {torch.device("cuda"): weights.size, CPU: reading.STAGING}


def test_available_memory_is_the_tightest_limit(monkeypatch, tmp_path):
    free = memory.available(CPU)
    assert 1 << 20 < free < 1 << 50
    own = tmp_path / "cgroup" / "outer" / "inner"
    own.mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/outer/inner\n")
    monkeypatch.setattr(memory, "PROC", tmp_path)
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    for group, most in ((own, "max"), (own.parent, "9000")):
        (group / "memory.max").write_text(most)
        (group / "memory.current").write_text("5000")
        (group / "memory.stat").write_text("anon 4000\nfile 1000\n")
    assert memory.available(CPU) == 9000 - 5000 + 1000
    (own / "memory.max").write_text("100")
    assert memory.available(CPU) == 0


def test_available_memory_knows_rlimits():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    with limited(resource.RLIMIT_AS, used + (1 << 30)):
        assert 0 < memory.available(CPU) <= 1 << 30
        with pytest.raises(NotEnoughMemory, match=r"cpu has no 4\.3 GB left for a tensor"):
            memory.allocate(1 << 32, CPU)


@pytest.mark.parametrize("count", [0, 1, memory.LARGE - 1, memory.LARGE, memory.LARGE + 5])
def test_allocate(count):
    found = memory.allocate(count, CPU)
    found.fill_(7)
    assert found.numel() == count and bool((found == 7).all())


def test_bench_load(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_load, "E", 1)
    monkeypatch.setattr(bench_load, "PIECE", 1 << 18)
    monkeypatch.setattr(bench_load, "SHAPES", {name: (1, *rest) for name, (_, *rest) in bench_load.SHAPES.items()})
    said = []
    for way in ("read", "map"):
        times = bench_load.bench_load(5_000_000, rounds=1, way=way, folder=tmp_path, progress=said.append)
        assert times.bytes == pytest.approx(5_000_000, rel=0.1)
        assert times.cold_load > 0 and times.warm_ratio > 0 and times.peak_ratio < 2
        assert "cold   plain read" in "\n".join(times.lines())
    assert said[0] == "writing 5.0 MB" and "warm load, 1 of 1" in said
    assert not list(tmp_path.iterdir())


def test_bench_load_without_room(monkeypatch, tmp_path, capsys):
    """It is refused before anything is written."""
    monkeypatch.setattr(bench_load, "write", lambda *anything: pytest.fail("it writes"))
    assert main(["bench", "load", "--gb", "1e9"]) == 2 and "at most" in capsys.readouterr().err
    monkeypatch.setattr(bench_load, "available", lambda device: 100)
    assert main(["bench", "load", "--gb", "1"]) == 4 and "smaller --gb" in capsys.readouterr().err
    monkeypatch.setattr(bench_load.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    assert main(["bench", "load", "--gb", "1"]) == 5 and "smaller --gb" in capsys.readouterr().err
