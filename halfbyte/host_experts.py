"""Experts of a checkpoint in host memory that a GPU can read: one area a layer, pinned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from . import memory
from .checkpoint import finite
from .checkpoint.finite import Check
from .checkpoint.ledger import Ledger, Mixture
from .checkpoint.reading import Progress, Target, direct, fill, read
from .errors import NotEnoughMemory, size
from .expert_shares import parts_of
from .ops.experts import Experts, Projection
from .ops.formats import Packed
from .residency import require_as_stored
from .stored_experts import CPU, in_slots

ALIGNED = 256  # bytes that a part begins at a multiple of


def named_parts(projection: Projection) -> dict[str, Tensor]:
    if isinstance(projection, Tensor):
        return {"weight": projection}
    assert isinstance(projection, Packed)
    found = {
        "weight": projection.words, "scales": projection.scales, "biases": projection.biases,
        "global_scale": projection.global_scale,
    }  # fmt: skip
    return {name: part for name, part in found.items() if part is not None}


def own(experts: Experts) -> list[Tensor]:
    """The parts that each expert has its own of, in one order."""
    projections = (experts.gate, experts.up, experts.down)
    found = [part for projection in projections for part in named_parts(projection).values()]
    return [part for part in found if part.shape[:1] == (experts.gate.shape[0],)]


def in_host_memory(
    ledger: Ledger, progress: Progress | None = None, check: Check = "sampled"
) -> tuple[dict[str, Experts], list[Tensor]]:
    """The experts of a checkpoint, read into host memory; and that memory, an area a layer, which is to be pinned."""
    require_as_stored(ledger.checkpoint.folder, ledger.mixtures)
    areas, targets, found = [], [], {}
    need = sum(room_for(mixture) for mixture in ledger.mixtures.values())
    memory.require(need, CPU, f"{ledger.checkpoint.folder}: its experts, of which the GPU has room for some")
    for name, mixture in ledger.mixtures.items():
        area, at = memory.allocate(max(room_for(mixture), memory.LARGE), CPU), 0
        areas.append(area)
        tensors: dict[tuple[int, str], Tensor] = {}
        for part, span in parts_of(mixture).items():
            flat, inside = area[at : at + span.size], 0
            tensors[part] = flat.view(span.dtype).view(span.shape)
            for stored, start, count in span.pieces:
                targets.append(Target(stored.path, stored.name, start, flat[inside : inside + count]))
                inside += count
            at += -(-span.size // ALIGNED) * ALIGNED
        found[name] = joined(ledger, mixture, tensors, check)
    fill(ledger.checkpoint.states, targets, direct, progress)
    named = {
        span.name: part
        for experts, mixture in zip(found.values(), ledger.mixtures.values(), strict=True)
        for span, part in zip(parts_of(mixture).values(), own(experts), strict=True)
    }
    finite.check(ledger.checkpoint.folder, named, ledger.stacks, ledger.modes, check)
    return found, areas


def room_for(mixture: Mixture) -> int:
    return sum(-(-span.size // ALIGNED) * ALIGNED for span in parts_of(mixture).values())


def joined(ledger: Ledger, mixture: Mixture, tensors: Mapping[tuple[int, str], Tensor], check: Check) -> Experts:
    """Experts of these parts; what they share is read now."""
    shared = [
        span for at, spans in enumerate(mixture.parts) for name, span in spans.items() if (at, name) not in tensors
    ]
    common = read(ledger.checkpoint.states, shared, CPU)
    finite.check(ledger.checkpoint.folder, common, set(), ledger.modes, check)
    projections, forms = [], (mixture.form.gate, mixture.form.up, mixture.form.down)
    for at, (form, spans) in enumerate(zip(forms, mixture.parts, strict=True)):
        parts = {
            name: tensors[at, name] if (at, name) in tensors else common[span.name] for name, span in spans.items()
        }
        projections.append(in_slots(form, parts))
    return Experts(*projections)


def pin(area: Tensor, device: torch.device) -> None:
    """Let the device read host memory: it stays where it is, for as long as it lives."""
    if device.type != "cuda":
        return
    status = int(torch.cuda.cudart().cudaHostRegister(area.data_ptr(), area.nbytes, 0))
    if status != 0:
        raise NotEnoughMemory(f"the system does not pin {size(area.nbytes)} of host memory for the GPU (CUDA {status})")


def unpin(areas: Sequence[Tensor], device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a copy may still read them
        for area in areas:
            torch.cuda.cudart().cudaHostUnregister(area.data_ptr())
