"""`halfbyte doctor`: what this machine has, what would be used, and why."""

from __future__ import annotations

import argparse
import platform
from typing import Any

from ..errors import size
from .terminal import show

PACKAGES = ("torch", "numpy", "numba", "triton", "safetensors", "tokenizers", "jinja2", "huggingface_hub")
METAL = "its kernels are executed and race-checked on a CPU, not yet timed on Apple hardware"


def arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    """Say what this machine has, which device and kernels would be used, and why not the others."""
    import torch

    from .. import __version__, machine, memory
    from ..fusion import FUSIONS, WITHOUT
    from ..listing import ops
    from ..loading import pick_device
    from ..ops.dispatch import CPU_ACTIVATIONS, LANGUAGE_OF, find

    chosen = pick_device(None)
    devices = {name: state() for name, state in (("cuda", cuda), ("mps", mps), ("cpu", cpu))}
    written = {name: sum(name in op.languages for op in ops()) for name in set(LANGUAGE_OF.values())}
    language, state = LANGUAGE_OF[chosen.type], find("numba", "store", "state")
    multiplies_bytes, picks_fields = (find("numba", "planes", name) for name in ("multiplies_bytes", "picks_fields"))
    assert state is not None and multiplies_bytes is not None and picks_fields is not None
    values: dict[str, Any] = {
        "halfbyte": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: version(name) for name in PACKAGES},
        "devices": devices,
        "device": str(chosen),
        "language": language,
        "kernels": written[language],
        "kernel_cache": state(),
        "memory_available": {str(one): memory.available(one) for one in {chosen, torch.device("cpu")}},
        "vectors": machine.vector_features(),
        "threads": torch.get_num_threads(),
        "threading_layer": machine.threading_layer(),
        "cpu_activations": list(CPU_ACTIVATIONS),
        "vnni": multiplies_bytes(),
        "vbmi": picks_fields(),
        "fusions": list(FUSIONS),
        "fusions_left_out": sorted(WITHOUT),
    }
    rows = [
        ("halfbyte", f"{__version__}, Python {values['python']}, {values['system']}"),
        ("packages", ", ".join(f"{name} {found or 'absent'}" for name, found in values["packages"].items())),
        *((name, said) for name, said in devices.items()),
        ("products", products(values["vnni"], values["vbmi"])),
        ("memory", ", ".join(f"{size(free)} free on {name}" for name, free in values["memory_available"].items())),
        ("kernels", kernel_cache(**values["kernel_cache"])),
        ("fusions", fusions(values["fusions"], values["fusions_left_out"])),
        ("used", f"{chosen}, with {language} kernels for {written[language]} of {len(ops())} ops"),
    ]
    show(values, rows, args.json)
    return 0


def products(vnni: bool, vbmi: bool) -> str:
    """What --cpu-activations may ask for, and how fast that is here."""
    if not vnni:
        return "on a CPU float32 (f32); --cpu-activations i16 and i8 multiply 16-bit numbers, for want of VNNI"
    formats = "1 to 6 bits" if vbmi else "1, 2 and 4 bits"
    return f"on a CPU float32 (f32), of {formats} by VNNI, as 24-bit numbers; --cpu-activations i16 and i8 take fewer"


def kernel_cache(folder: str, lasts: bool, kernels: int, bytes: int) -> str:
    if not lasts:
        return (
            f"{folder} cannot be used, so CPU kernels are compiled at every start; XDG_CACHE_HOME names another place"
        )
    return f"{kernels} compiled for this CPU, {size(bytes)} in {folder}"


def fusions(names: list[str], left_out: list[str]) -> str:
    """What is done to a decode step on a GPU before it is replayed."""
    done = ", ".join(name for name in names if name not in left_out) or "none"
    return f"{done}; HALFBYTE_WITHOUT leaves out {', '.join(left_out)}" if left_out else done


def version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cuda() -> str:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return "no: this torch is built without CUDA; install one that is (pytorch.org says how)"
    if not torch.cuda.is_available():
        return "no: torch finds no GPU, or a driver older than its CUDA needs"
    facts = torch.cuda.get_device_properties(0)
    absent = "" if version("triton") else "; triton is absent, so ops run as torch"
    return f"yes: {facts.name}, {size(facts.total_memory)}, compute {facts.major}.{facts.minor}{absent}"


def mps() -> str:
    import torch

    if platform.system() != "Darwin":
        return f"no: not a Mac; {METAL}"
    if not torch.backends.mps.is_available():
        return f"no: macOS 14 and an Apple GPU are needed; {METAL}"
    return f"yes; {METAL}"


def cpu() -> str:
    import torch

    from .. import machine

    vectors = ", ".join(machine.vector_features()) or "no vectors"
    warning = machine.slow_threads()
    said = f"yes: {machine.cpu_name()}, {vectors}, {torch.get_num_threads()} threads ({machine.threading_layer()})"
    return f"{said}; {warning}" if warning else said
