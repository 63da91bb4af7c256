"""Experts repacked beside the shards: one read each, the same tokens, and mlx-lm still loads the folder."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from streaming import TINY, budget_of, mixtures_of, shard, tokens

from halfbyte import cli, expert_reader
from halfbyte.accounting import skeleton
from halfbyte.checkpoint.sidecar import MANIFEST, file_size, own_parts, path_of, stride
from halfbyte.conversion import repacking, saving
from halfbyte.conversion.repacking import repack
from halfbyte.errors import CheckpointError, StorageError
from halfbyte.fitting import CPU, Allowed
from halfbyte.loading import load_model
from halfbyte.memory import LIMITS, held


@pytest.fixture
def repacked(copied):
    assert cli.main(["convert", str(copied), "--repack"]) == 0
    return copied


@pytest.fixture
def repacked_bytes(tmp_path):
    """What a repacked folder has, by file."""
    folder = Path(shutil.copytree(TINY, tmp_path / "whole"))
    assert cli.main(["convert", str(folder), "--repack"]) == 0
    return contents(folder)


def test_the_same_tokens_with_one_read_an_expert(resident, repacked, monkeypatch):
    model = load_model(repacked, expert_cache=budget_of(TINY, 6))
    monkeypatch.setattr(expert_reader, "NOWAIT", 0)  # as if the system had nothing in memory
    assert tokens(model) == tokens(resident)
    reads = model.residency.reads
    read = reads.missing + model.residency.shelves[0].cache.read_ahead.total()
    assert model.residency.reader.calls == read and reads.bytes == read * 27648


def test_straight_from_the_disk_into_slots(resident, repacked):
    model = load_model(repacked, allowed=Allowed(expert_cache=budget_of(TINY, 6), memory_limit=held(CPU) + (2 << 30)))
    LIMITS.clear()
    assert not model.residency.reader.files.buffered and tokens(model) == tokens(resident)


def test_the_folder_is_what_it_was_and_can_be_repacked_again(repacked, capsys):
    import mlx_lm

    assert not [name for name in os.listdir(repacked) if name.startswith(".tmp")]
    assert all(path_of(repacked, layer).stat().st_size == 16 * 28672 for layer in range(8))
    assert mlx_lm.utils.load_model(repacked)[0] is not None
    assert cli.main(["convert", str(repacked), "--repack"]) == 0 and "8 files" in capsys.readouterr().out


def test_a_sidecar_of_other_weights_is_refused(repacked):
    """The same shapes with other numbers, a file that is short or missing, a manifest of something else."""
    load = {"expert_cache": budget_of(TINY, 6)}
    fourth = mixtures_of(repacked)[3].parts[0]
    for expert, part in ((2, "biases"), (9, "weight"), (1, "scales")):
        piece = fourth[part].entry(expert)
        whole = shard(repacked).read_bytes()
        shard(repacked).write_bytes(whole[: piece.start] + os.urandom(100) + whole[piece.start + 100 :])
        with pytest.raises(CheckpointError, match=r"experts-03\.bin: its experts are not those of the shards"):
            load_model(repacked, **load)
        shard(repacked).write_bytes(whole)
    load_model(repacked, **load)
    with shard(repacked).open("r+b") as file:
        file.seek(fourth["weight"].entry(0).start)
        file.write(os.urandom(100))
    with pytest.raises(CheckpointError, match=r"experts-03\.bin: its experts are not those of the shards.*--repack"):
        load_model(repacked, **load)
    os.truncate(path_of(repacked, 2), 4096)
    with pytest.raises(CheckpointError, match=r"experts-02\.bin: it has 4096 bytes"):
        load_model(repacked, **load)
    path_of(repacked, 1).unlink()
    with pytest.raises(CheckpointError, match=r"experts-01\.bin: No such file"):
        load_model(repacked, **load)
    said = json.loads((repacked / MANIFEST).read_text())
    (repacked / MANIFEST).write_text(json.dumps({**said, "fingerprint": "another"}))
    with pytest.raises(CheckpointError, match="not of this checkpoint"):
        load_model(repacked, **load)


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused_after(count, real=os.pwrite):
    """An os.pwrite for which the disk is full after so many writes."""
    left = iter(range(count))

    def write(descriptor, data, at):
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, at)

    return write


@pytest.mark.parametrize("writes", [0, 5, 20, 127])
def test_a_full_disk_leaves_the_folder_as_it_was(writes, copied, monkeypatch, capsys):
    """Exit 5, all that was written is gone, and the next run loads the shards."""
    before = contents(copied)
    monkeypatch.setattr(os, "pwrite", refused_after(writes))
    assert cli.main(["convert", str(copied), "--repack"]) == 5
    assert "No space left on device. What was written has been removed." in capsys.readouterr().err
    monkeypatch.undo()
    assert contents(copied) == before and not list(copied.glob(".tmp*"))
    assert load_model(copied, expert_cache=budget_of(TINY, 6)).residency is not None


def test_an_older_sidecar_stays_until_the_new_one_is_whole(repacked, monkeypatch):
    before = contents(repacked)
    monkeypatch.setattr(os, "pwrite", refused_after(40))
    assert cli.main(["convert", str(repacked), "--repack"]) == 5
    monkeypatch.undo()
    assert contents(repacked) == before and not list(repacked.glob(".tmp*"))


@pytest.mark.parametrize("at", [0, 3, 7, 8])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=["EIO", "^C"])
@pytest.mark.parametrize("fixture", ["copied", "repacked"])
def test_what_goes_wrong_while_files_are_put_in_place_leaves_no_sidecar(fixture, error, at, monkeypatch, request):
    """Some files would be of the older one, some of the new: neither is worth its space."""
    folder, left, whole = request.getfixturevalue(fixture), iter(range(at)), os.replace

    def fail(source, target):
        if next(left, None) is None:
            raise error
        whole(source, target)

    monkeypatch.setattr(os, "replace", fail)
    assert cli.main(["convert", str(folder), "--repack"]) == (5 if isinstance(error, OSError) else 130)
    monkeypatch.undo()
    assert contents(folder) == contents(TINY) and not list(folder.glob(".tmp*"))


def test_an_interrupt_leaves_the_folder_as_it_was(copied):
    before = contents(copied)

    def interrupt(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repack(skeleton(copied)[1], interrupt)
    assert contents(copied) == before and not list(copied.glob(".tmp*"))


def test_the_second_of_two_says_so(copied, repacked_bytes):
    """And leaves the first alone."""
    said = []

    def meanwhile(done, total):
        with pytest.raises(StorageError, match=r"experts\.json: another process is writing it") as caught:
            repack(skeleton(copied)[1], lambda done, total: None)
        said.append(caught.value.exit_code)

    repack(skeleton(copied)[1], meanwhile)
    assert said == [5] * 8 and contents(copied) == repacked_bytes and not list(copied.glob(".tmp*"))


def test_what_a_dead_process_left_is_taken_over(copied, repacked_bytes):
    left = copied / f"{saving.ASIDE}{MANIFEST}"
    left.mkdir()
    (left / "experts-07.bin").write_bytes(b"half")
    assert cli.main(["convert", str(copied), "--repack"]) == 0
    assert contents(copied) == repacked_bytes and not list(copied.glob(".tmp*"))


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_in_the_way_is_named_and_stays(copied, capsys, kind):
    way = copied / f"{saving.ASIDE}{MANIFEST}"
    if kind == "link":
        way.symlink_to(copied)  # not followed: what it links to would be emptied
    else:
        way.write_text("somebody's")
    before = contents(copied)
    assert cli.main(["convert", str(copied), "--repack"]) == 5
    assert f"{way}: it is in the way" in capsys.readouterr().err and contents(copied) == before


def test_a_folder_that_takes_no_files_is_refused(copied, monkeypatch, capsys):
    def refuse(path, mode=0o777):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    before = contents(copied)
    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(SystemExit) as ended:
        cli.main(["convert", str(copied), "--repack"])
    monkeypatch.undo()
    assert ended.value.code == 2 and contents(copied) == before
    assert f"{copied} is not writable (Permission denied). Make it so, or use another." in capsys.readouterr().err


def test_a_folder_in_the_place_of_a_file_is_named(copied, capsys):
    (copied / "experts-03.bin").mkdir()
    assert cli.main(["convert", str(copied), "--repack"]) == 5
    assert f"{copied / 'experts-03.bin'}: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["biases", "scales"])
def test_what_could_not_be_used_is_not_written(copied, capsys, part):
    weights = load_file(shard(copied))
    name = next(name for name in weights if name.endswith(f"layers.3.mlp.switch_mlp.up_proj.{part}"))
    weights[name] = weights[name].float()
    save_file(weights, shard(copied), {"format": "mlx"})
    before = contents(copied)
    disk = ["generate", str(copied), "-p", "A fox", "-m", "1", "--device", "cpu", "--expert-cache", "2MB"]
    for command in (["convert", str(copied), "--repack"], disk):
        assert cli.main(command) == 3
        assert "scales and biases of its experts differ in dtype" in capsys.readouterr().err
    assert contents(copied) == before


def test_no_number_in_a_sidecar_has_it_made_again(repacked):
    """Nobody can download one."""
    mixture = mixtures_of(repacked)[3]
    parts = own_parts(mixture)
    end = sum(span.size // span.shape[0] for _, _, span in parts)  # of an expert: the last of its biases
    with path_of(repacked, 3).open("r+b") as file:
        for expert in range(16):
            if expert % len(parts) != len(parts) - 1:  # of these, what is looked at when it is found is another part
                file.seek(expert * stride(mixture) + end - 2)
                file.write(b"\xc0\x7f")
    with pytest.raises(CheckpointError, match=r"experts-03\.bin: tensor .* holds NaN .*--repack`, or remove"):
        tokens(load_model(repacked, expert_cache=budget_of(TINY, 5)))


def test_a_manifest_that_cannot_be_read_says_what_to_do(repacked):
    (repacked / MANIFEST).unlink()
    (repacked / MANIFEST).mkdir()
    with pytest.raises(StorageError, match=r"Is a directory\. Make it again"):
        load_model(repacked, expert_cache=budget_of(TINY, 6))


def test_a_dry_run_says_what_would_be_written_and_writes_nothing(copied, capsys):
    before, total = contents(copied), sum(map(file_size, mixtures_of(copied)))
    assert cli.main(["convert", str(copied), "--repack", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "experts-00.bin to experts-07.bin: 16 experts each, 458.8 kB a file" in said
    assert "8 files, 3.7 MB (not written)" in said
    assert cli.main(["convert", str(copied), "--repack", "--dry-run", "--json"]) == 0
    expected = {"source": str(copied), "written": False, "files": 8, "bytes": total, "bytes_written": 0}
    assert json.loads(capsys.readouterr().out) == expected
    assert contents(copied) == before and not list(copied.glob(".tmp*"))


def test_a_dry_run_names_files_of_each_size(monkeypatch):
    sizes = iter([1000, 2000, 2000, 1000, 1000, 1000, 1000, 1000])
    monkeypatch.setattr(repacking, "file_size", lambda mixture: next(sizes))
    assert list(repacking.lines(skeleton(TINY)[1])) == [
        "experts-00.bin: 16 experts, 1.0 kB",
        "experts-01.bin to experts-02.bin: 16 experts each, 2.0 kB a file",
        "experts-03.bin to experts-07.bin: 16 experts each, 1.0 kB a file",
    ]


def test_an_older_sidecar_whose_manifest_cannot_be_removed_keeps_its_files(repacked, monkeypatch):
    before = contents(repacked)

    def refuse(path, missing_ok=False, real=Path.unlink):
        if path == repacked / MANIFEST:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    assert cli.main(["convert", str(repacked), "--repack"]) == 5
    monkeypatch.undo()
    assert contents(repacked) == before and not list(repacked.glob(".tmp*"))


@pytest.mark.parametrize("damaged", ["first", "last", "inside", "padding"])
def test_verify_compares_every_byte(damaged, repacked, capsys):
    """And says which file and which expert of it is wrong."""
    mixture, expert = mixtures_of(repacked)[3], 9
    used = sum(span.size // span.shape[0] for _, _, span in own_parts(mixture))
    at = {"first": 0, "last": used - 1, "inside": 5000, "padding": stride(mixture) - 1}[damaged]
    assert cli.main(["verify", str(repacked)]) == 0
    assert "8 files, as in the shards" in capsys.readouterr().out
    with path_of(repacked, 3).open("r+b") as file:
        file.seek(expert * stride(mixture) + at)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    assert cli.main(["verify", str(repacked)]) == 3
    said = capsys.readouterr().err
    assert "experts-03.bin: expert 9 is not that of the shards" in said and "--repack" in said


def test_verify_says_what_is_wrong_with_a_whole_sidecar(repacked, capsys):
    manifest = (repacked / MANIFEST).read_text()
    os.truncate(path_of(repacked, 2), 4096)
    assert cli.main(["verify", str(repacked)]) == 3 and "experts-02.bin: it has 4096 bytes" in capsys.readouterr().err
    (repacked / MANIFEST).write_text(manifest.replace('"fingerprint": "', '"fingerprint": "0'))
    assert cli.main(["verify", str(repacked)]) == 3 and "not of this checkpoint" in capsys.readouterr().err
    (repacked / MANIFEST).unlink()  # nobody reads the rest then
    assert cli.main(["verify", str(repacked), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["repacked"] == []


def test_verify_shows_how_far_it_is_over_shards_and_sidecar(repacked, monkeypatch):
    seen = []
    monkeypatch.setattr("halfbyte.commands.verify.bar", lambda what: lambda done, total: seen.append((done, total)))
    assert cli.main(["verify", str(repacked)]) == 0
    total = shard(repacked).stat().st_size + sum(map(file_size, mixtures_of(repacked)))
    assert seen == sorted(seen) and {total for _, total in seen} == {total} and seen[-1][0] == total and len(seen) > 128


def test_usage(capsys):
    for wrong in (["convert", "tiny"], ["convert", "tiny", "x", "--repack"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(wrong)
        assert ended.value.code == 2 and "SRC --repack" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["-q"], "--quantize"), (["--q-bits", "0"], "--q-bits"), (["--q-group-size", "64"], "--q-group-size"),
        (["--q-mode", "affine"], "--q-mode"), (["--quant-predicate", "mixed_2_6"], "--quant-predicate"),
        (["--dtype", "float16"], "--dtype"), (["-d"], "--dequantize"),
        (["-q", "--q-bits", "4", "--dtype", "float16", "--dry-run"], "--quantize, --q-bits and --dtype"),
    ],
)  # fmt: skip
def test_what_only_a_conversion_takes_is_refused(options, named, copied, capsys):
    before = contents(copied)
    with pytest.raises(SystemExit) as ended:
        cli.main(["convert", str(copied), "--repack", *options])
    assert ended.value.code == 2 and contents(copied) == before
    assert f"argument --repack: not with {named}: experts are written as they are" in capsys.readouterr().err
