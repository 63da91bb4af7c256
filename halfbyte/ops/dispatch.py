"""Which kernel runs an op. The tensor's device picks the language; `kernel` is the one door between ops and kernels.

Everything an op shares with the others is here too: the contract's `require`, the dtypes, `out=`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

LANGUAGES = ("torch", "numba", "triton", "metal")
LANGUAGE_OF = {"cpu": "numba", "cuda": "triton", "mps": "metal"}  # by device
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int32, torch.int64)
CPU_ACTIVATIONS = ("f32", "i16", "i8")

_forced: ContextVar[str | None] = ContextVar("forced language", default=None)
_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
_deterministic = False
_cpu_activations = "f32"


class Entry(NamedTuple):
    """One op call: what ran it. `kernel` is None where the torch body did."""

    op: str
    language: str
    kernel: Callable[..., Any] | None
    family: str


Watcher = Callable[[Entry], Callable[..., Any] | None]  # sees a call coming, and says what is to run instead


def language(x: Tensor) -> str:
    """The language that runs ops on x. float64 always means the torch body: that is how a test asks for exactness."""
    if x.dtype is torch.float64:
        return "torch"
    return _forced.get() or LANGUAGE_OF.get(x.device.type, "torch")


@cache
def find(language: str, family: str, op: str) -> Callable[..., Any] | None:
    """kernels/<language>/<family>.py::<op>, or None where it is not written."""
    if language == "torch":
        return None
    for module in (f"halfbyte.kernels.{language}", f"halfbyte.kernels.{language}.{family}"):
        if find_spec(module) is None:
            return None
    return getattr(import_module(module), op, None)


def kernel(family: str, op: str, x: Tensor) -> Callable[..., Any] | None:
    """The kernel of an op for x's device, shown to whoever watches; None means: run the torch body."""
    chosen = language(x)
    found = find(chosen, family, op)
    if (watch := _watcher.get()) is not None:
        return watch(Entry(op, chosen if found else "torch", found, family))
    return found


def as_one(op: str, work: Callable[..., Any], x: Tensor, *, opens: bool = False) -> Callable[..., Any]:
    """`work`, shown to whoever watches as one call of this name: the kernels that it is made of are not.

    `opens`: to a watcher who does not take it as one they are.
    """
    if (watch := _watcher.get()) is None:
        return work

    def alone(*args: Any, **kwargs: Any) -> Any:
        with watching(lambda entry: entry.kernel):
            return work(*args, **kwargs)

    return watch(Entry(op, language(x), alone, "")) or (work if opens else alone)


@contextmanager
def using(language: str) -> Iterator[None]:
    """Run every op in this language, whatever the device ("triton" on CPU tensors is Triton's interpreter)."""
    if language not in LANGUAGES:
        raise ValueError(f"using: language must be one of {', '.join(LANGUAGES)}, got {language!r}")
    token = _forced.set(language)
    try:
        yield
    finally:
        _forced.reset(token)


def make_deterministic(on: bool = True) -> None:
    """From now on a row's bits depend on nothing that is beside it in a batch, for all of the process.

    Kernels for a CPU are always so. On a GPU a batch of up to 64 rows is computed as single rows would be, which costs
    speed (docs/performance.md); more rows are a prompt's, which must then be alone in its step.
    """
    global _deterministic
    _deterministic = on
    if find_spec("halfbyte.kernels.triton") is not None:
        import_module("halfbyte.kernels.triton.device").make_deterministic(on)


def is_deterministic() -> bool:
    return _deterministic


def use_cpu_activations(kind: str) -> None:
    """From now on products on a CPU take activations so, for all of the process.

    f32: to float32's precision. i16, i8: rounded to whole numbers of 16 or 8 bits, a step for each group, where weights
    are affine (3, 5 and 6 bits: on a CPU with VBMI); others keep f32. Faster, and off by about 1e-4 or 1e-2 of a
    result: `perplexity --kl` says what that costs a model. A row's bits do not depend on its batch in any of them. To
    be settled before a model's first step: steps that were recorded stay as they were.
    """
    global _cpu_activations
    if kind not in CPU_ACTIVATIONS:
        raise ValueError(f"use_cpu_activations: kind must be one of {', '.join(CPU_ACTIVATIONS)}, got {kind!r}")
    _cpu_activations = kind
    import_module("halfbyte.kernels.numba.products").use_activations(kind)


def cpu_activations() -> str:
    return _cpu_activations


@contextmanager
def with_cpu_activations(kind: str) -> Iterator[None]:
    """Inside, as `use_cpu_activations`; for all threads."""
    before = _cpu_activations
    use_cpu_activations(kind)
    try:
        yield
    finally:
        use_cpu_activations(before)


def reference() -> Any:
    """Run every op as its torch body."""
    return using("torch")


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Show every op call inside the block to the watcher, whose answer runs in the kernel's place."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def watched() -> bool:
    """Whether somebody sees every op call, or says in which language: such calls must be made, not replayed."""
    return _watcher.get() is not None or _forced.get() is not None


@contextmanager
def trace() -> Iterator[list[Entry]]:
    """List every (op, language, kernel) entered inside the block, in order."""
    entries: list[Entry] = []

    def note(entry: Entry) -> Callable[..., Any] | None:
        entries.append(entry)
        return entry.kernel

    with watching(note):
        yield entries


def require(condition: bool, op: str, argument: str, expected: str, *got: Any) -> None:
    """Raise a ValueError that names the op, the argument, what was expected and what came. Formats only on failure."""
    if not condition:
        refuse(op, argument, expected, *got)


def refuse(op: str, argument: str, expected: str, *got: Any) -> NoReturn:
    """As a failed `require`, for checks whose text is worth forming only when it is needed."""
    came = f"; got {', '.join(map(describe, got))}" if got else ""
    raise ValueError(f"{op}: {argument} must be {expected}{came}")


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
    return repr(value)


def usual(x: Any, shape: tuple[int, ...], device: torch.device) -> bool:
    """Whether x is a plain tensor of floats of this shape on this device.

    What `require` checks one by one, with a text for each, takes longer than a small kernel. So ops first ask whether
    everything is as usual, in one expression, and only if it is not go through their contract.
    """
    return type(x) is Tensor and x.dtype in FLOATS and x.shape == shape and x.device == device


def require_floats(op: str, device: torch.device, **tensors: Tensor | None) -> None:
    """Every tensor that is given is a floating point tensor on this device."""
    for name, tensor in tensors.items():
        if tensor is not None:
            if not isinstance(tensor, Tensor):
                refuse(op, name, "a tensor", tensor)
            if tensor.dtype not in FLOATS:
                refuse(op, name, "float32, bfloat16, float16 or float64", tensor)
            if tensor.device != device:
                refuse(op, name, f"on {device}, as the first argument", tensor)


def require_out(op: str, out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if out is not None:
        require(isinstance(out, Tensor), op, "out", "a tensor", out)
        if tuple(out.shape) != tuple(shape) or out.dtype != dtype or out.device != device:
            refuse(op, "out", f"{dtype} of shape {list(shape)} on {device}", out)


def wide(x: Tensor) -> Tensor:
    """x in the dtype that bodies compute in: float32, or float64 when a test asks."""
    return x if x.dtype == torch.float64 else x.float()


def deliver(result: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The result rounded once to dtype, written into `out` where one is given."""
    rounded = result.to(dtype)
    return rounded if out is None else out.copy_(rounded)
