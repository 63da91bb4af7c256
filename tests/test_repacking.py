"""Experts repacked beside the shards: one read each, the same tokens, and mlx-lm still loads the folder."""

import json
import os

import pytest
from streaming import TINY, budget_of, mixtures_of, shard, tokens

from halfbyte import cli, expert_reader
from halfbyte.checkpoint.sidecar import MANIFEST, path_of
from halfbyte.errors import CheckpointError
from halfbyte.fitting import CPU, Allowed
from halfbyte.loading import load_model
from halfbyte.memory import LIMITS, held


@pytest.fixture
def repacked(copied):
    assert cli.main(["convert", str(copied), "--repack"]) == 0
    return copied


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


def test_what_goes_wrong_leaves_no_sidecar(copied, monkeypatch, capsys):
    """The disk is full: exit 5, the space is free again, and the next run loads the shards."""
    written = []

    def full(descriptor, data, at, real=os.pwrite):
        written.append(len(data))
        if len(written) > 20:
            raise OSError(28, os.strerror(28))
        return real(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    assert cli.main(["convert", str(copied), "--repack"]) == 5
    assert "No space left" in capsys.readouterr().err
    monkeypatch.undo()
    assert not (copied / MANIFEST).exists() and not list(copied.glob(".tmp*"))
    assert load_model(copied, expert_cache=budget_of(TINY, 6)).residency is not None


def test_usage(capsys):
    for wrong in (["convert", "tiny"], ["convert", "tiny", "x", "--repack"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(wrong)
        assert ended.value.code == 2 and "SRC --repack" in capsys.readouterr().err
