"""Safetensors files that are damaged, or made to do damage: rows 1 to 12 of the fault plan, by number."""

import json
import subprocess
import sys

import checkpoint_files as made
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from halfbyte import limits
from halfbyte.checkpoint import shards
from halfbyte.errors import CheckpointError

GOOD = {"a": made.entry(0, 4, [2], "BF16"), "b": made.entry(4, 12, [2, 1], "F32")}
DATA = bytes(range(12))


def refused(path, *said):
    with pytest.raises(CheckpointError) as caught:
        shards.read(path)
    message = str(caught.value)
    assert str(path) in message
    for text in said:
        assert text in message
    return message


def test_a_good_file(tmp_path):
    path = made.raw(tmp_path / "x.safetensors", {"__metadata__": {"format": "mlx"}, **GOOD}, DATA)
    a, b = shards.read(path).tensors
    assert (a.name, a.dtype, a.shape, b.size) == ("a", torch.bfloat16, (2,), 8)
    assert path.read_bytes()[a.start : a.start + a.size] == DATA[:4]
    assert b.start + b.size == path.stat().st_size


@pytest.mark.parametrize("cut", [1, 6, 11])
def test_row_01_truncated_in_the_data(tmp_path, cut):
    path = made.raw(tmp_path / "x.safetensors", GOOD, DATA[:-cut])
    size = path.stat().st_size
    name = "'a'" if cut > 8 else "'b'"
    end = size + cut - (8 if cut > 8 else 0)
    refused(path, name, f"ends at byte {end}, but the file has {size}", "halfbyte pull --force")


@pytest.mark.parametrize("size", [0, 3, 7, 8, 40])
def test_row_02_truncated_in_the_header(tmp_path, size):
    path = made.raw(tmp_path / "x.safetensors", GOOD, DATA)
    path.write_bytes(path.read_bytes()[:size])
    refused(path, "halfbyte pull --force")


LENGTHS = (2**63, 2**64 - 1, 1 << 40, limits.HEADER_BYTES + 1, 4096)


def test_row_03_header_lengths_are_refused_before_memory_is_taken(tmp_path):
    """In a process that may take 64 MB more: nothing is allocated for a header that cannot be."""
    paths = [str(made.raw(tmp_path / f"{n}.safetensors", GOOD, DATA, length=n)) for n in LENGTHS]
    code = """
import resource, sys
from pathlib import Path
from halfbyte.checkpoint import shards
from halfbyte.errors import CheckpointError
def pages(column): return int(Path("/proc/self/statm").read_text().split()[column])
limit = pages(0) * resource.getpagesize() + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
before = pages(1)
for path in sys.argv[1:]:
    try:
        shards.read(Path(path))
    except CheckpointError as error:
        print(error)
assert (pages(1) - before) * resource.getpagesize() < 5 << 20
"""
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == len(LENGTHS)
    assert all("more than 100000000" in line for line in said[:-1])
    assert "header would end at byte 4104, but the file has" in said[-1]


def test_row_04_overlap(tmp_path):
    header = {"a": made.entry(0, 8), "b": made.entry(4, 12)}
    refused(made.raw(tmp_path / "x.safetensors", header, DATA), "'b' overlaps 'a'")


def test_row_05_holes_and_trailing_bytes(tmp_path):
    hole = {"a": made.entry(0, 4), "b": made.entry(8, 12)}
    refused(made.raw(tmp_path / "x.safetensors", hole, DATA), "'b' leaves a hole of 4 bytes after 'a'")
    late = {"a": made.entry(4, 12)}
    refused(made.raw(tmp_path / "x.safetensors", late, DATA), "leaves a hole of 4 bytes after the header")
    refused(made.raw(tmp_path / "x.safetensors", GOOD, DATA + b"!"), "1 bytes follow the last tensor")


def test_row_06_duplicate_key(tmp_path):
    text = json.dumps(made.entry(0, 12))
    header = f'{{"a": {text}, "a": {text}}}'.encode()
    refused(made.raw(tmp_path / "x.safetensors", header, DATA), "key 'a' stands in it twice")


@pytest.mark.parametrize("offsets", [[-4, 8], [8, 0], [0, 1 << 70], [0, 2**63], [0.0, 12], [True, 12], [0], "0", None])
def test_row_07_offsets(tmp_path, offsets):
    header = {"a": {"dtype": "U8", "shape": [12], "data_offsets": offsets}}
    refused(made.raw(tmp_path / "x.safetensors", header, DATA))


def test_row_07_past_the_end(tmp_path):
    path = made.raw(tmp_path / "x.safetensors", {"a": made.entry(0, 1 << 30)}, DATA)
    refused(path, f"{(1 << 30) - 12} bytes are missing")


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ([11], "takes 11 bytes, its offsets [0, 12] span 12"),
        ([2**32, 2**32], "2^31 - 1"),
        ([2**31 - 1] * 3 + [8], "its offsets [0, 12] span 12"),  # wraps to a small number in 64 bits
        ([-1, -12], "2^31 - 1"),
        ([2**31], "2^31 - 1"),
        ([12.0], "2^31 - 1"),
        ([True, 12], "2^31 - 1"),
        ([1] * 9 + [12], "at most 8 sizes"),
        ([2**31 - 1] * 100_000, "at most 8 sizes"),
        ("12", "2^31 - 1"),
    ],
    ids=str,
)
def test_row_08_shapes(tmp_path, shape, said):
    refused(made.raw(tmp_path / "x.safetensors", {"a": made.entry(0, 12, shape)}, DATA), "'a'", said)


@given(st.lists(st.integers(-(2**65), 2**65), max_size=5), st.sampled_from(sorted(shards.DTYPES)))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_row_08_any_shape(tmp_path, shape, dtype):
    """A shape is taken only if its exact size is that of the data."""
    path = made.raw(tmp_path / "x.safetensors", {"a": made.entry(0, 12, shape, dtype)}, DATA)
    try:
        (found,) = shards.read(path).tensors
    except CheckpointError:
        return
    assert torch.Size(found.shape).numel() * found.dtype.itemsize == 12


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"a": made.entry(0, 12, dtype="F7")}, "unknown dtype 'F7'"),
        ({"a": made.entry(0, 12, dtype=["U8"])}, "unknown dtype"),
        (b"[" * 200_000, "nests deeper than 64"),
        (b'{"a":' * 200_000, "nests deeper than 64"),
        (json.dumps({"__metadata__": eval("[" * 70 + "]" * 70)}).encode(), "nests deeper than 64"),
        (b'{"\xff\xfe": 1}', "not UTF-8 at byte 2"),
        (b'{"a": 1', "not JSON"),
        (b"[]", "a JSON object was expected, it holds a list"),
        ({"a": 1}, "dtype, shape and data_offsets were expected"),
        ({"a": {**made.entry(0, 12), "more": 1}}, "dtype, shape and data_offsets were expected"),
        ({"x" * 1025: made.entry(0, 12)}, "its name has 1025 characters"),
        ({"__metadata__": {"format": 1}, "a": made.entry(0, 12)}, "__metadata__"),
        (b'{"a": {"dtype": "U8", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 12]}}', "integer of 5000 digits"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_row_09_headers(tmp_path, header, said):
    refused(made.raw(tmp_path / "x.safetensors", header, DATA), said)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"<!DOCTYPE html><html><body>404</body>", "this is an HTML page, not weights"),
        (b"\n  <html lang=en>", "this is an HTML page, not weights"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            "this is a Git-LFS pointer, not weights",
        ),
        (b"PK\x03\x04rest of a zip", "zip file (PyTorch's pickle format)"),
        (b"GGUF\x03\0\0\0rest", "GGUF"),
    ],
)
def test_row_10_other_files(tmp_path, data, said):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    refused(path, said)
    with pytest.raises(CheckpointError, match=r"[^.]\.$"):
        shards.read(path)


@pytest.mark.parametrize("padding", range(4))
def test_row_11_unaligned_and_shuffled(tmp_path, padding):
    """mlx pads no header and writes tensors in the order of a hash map."""
    stored = made.tensors()
    made.save(tmp_path / "good", stored)
    header, data = {"__metadata__": {"pad": "x" * padding}}, b""
    for name in sorted(stored, key=lambda name: hash(name[::-1])):
        tensor = stored[name]
        kind = {torch.uint32: "U32", torch.bfloat16: "BF16"}[tensor.dtype]
        header[name] = made.entry(len(data), len(data) + tensor.nbytes, list(tensor.shape), kind)
        data += tensor.view(torch.uint8).numpy().tobytes()
    made.save(tmp_path / "bad")
    made.raw(tmp_path / "bad" / "model.safetensors", header, data)
    for how in ("read", "map"):
        a, b = (made.load(tmp_path / name, load=how) for name in ("good", "bad"))
        for x, y in ((a.gate, b.gate), (a.experts.down, b.experts.down)):
            assert torch.equal(x.words, y.words) and torch.equal(x.scales, y.scales)
            assert torch.equal(x.biases, y.biases)
            assert all(tensor.data_ptr() % tensor.itemsize == 0 for tensor in (y.words, y.scales, y.biases))
        assert torch.equal(a.norm, b.norm)


numbers = st.one_of(st.integers(-2, 16), st.integers(-(2**66), 2**66), st.floats(), st.booleans(), st.none())
entries = st.fixed_dictionaries(
    {"dtype": st.one_of(st.sampled_from(sorted(shards.DTYPES)), st.text(max_size=3), numbers)},
    optional={
        "shape": st.one_of(st.lists(numbers, max_size=4), numbers),
        "data_offsets": st.one_of(st.lists(st.integers(0, 12), min_size=2, max_size=2), st.lists(numbers, max_size=3)),
        "extra": numbers,
    },
)
names = st.one_of(st.sampled_from(["a", "b", "__metadata__", "__float__", "\ud800", "\0"]), st.text(max_size=4))
headers = st.dictionaries(names, st.one_of(entries, numbers, st.text(max_size=3), st.just([])), max_size=4).map(
    lambda header: json.dumps(header).encode()
)


@st.composite
def files(draw):
    """A header from the grammar or a good one, damaged at a few places; its length true or not."""
    header = bytearray(draw(st.one_of(headers, st.just(json.dumps(GOOD).encode()), st.binary(max_size=64))))
    for _ in range(draw(st.integers(0, 3))):
        if header:
            at = draw(st.integers(0, len(header) - 1))
            header[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=2))
    length = draw(st.one_of(st.just(len(header)), st.integers(0, 2**64 - 1)))
    return length.to_bytes(8, "little") + bytes(header) + draw(st.sampled_from([DATA, b"", bytes(13)]))


@given(files())
@settings(max_examples=2000, suppress_health_check=list(HealthCheck))
def test_row_12_fuzzed_files_give_typed_errors_or_tensors(tmp_path, data):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    try:
        tensors = shards.read(path).tensors
    except CheckpointError as error:
        assert str(error).encode()  # can be printed
        return
    assert sum(tensor.size for tensor in tensors) == len(data) - 8 - int.from_bytes(data[:8], "little")


def test_what_the_package_writes_is_read(tmp_path):
    """Every dtype, an empty tensor and a scalar."""
    given = {kind: torch.zeros(3, dtype=dtype) for kind, dtype in shards.DTYPES.items()}
    given |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(1.0)}
    save_file(given, tmp_path / "x.safetensors")
    found = {tensor.name: tensor for tensor in shards.read(tmp_path / "x.safetensors").tensors}
    assert {name: (tensor.dtype, torch.Size(tensor.shape)) for name, tensor in found.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in given.items()
    }
