"""From a Hugging Face or MLX checkpoint to an MLX one: quantised, to other bits, or dense again.

Names, formats and bits are those that mlx-lm's own conversion gives. A few rows are read, brought to a dtype, quantised
and written at a time, so memory does not grow with the model. The result appears in its place all at once.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from .. import hub
from ..checkpoint import folder as checkpoints
from ..checkpoint.quantisation import Format
from ..checkpoint.reading import Progress
from ..models import MODELS
from ..ops.formats import DEFAULTS, require_format
from . import originals, planning, saving
from .planning import DTYPES, Plan
from .recipes import MIXED, Predicate

__all__ = ["Plan", "convert"]


def convert(
    hf_path: Path | str,
    mlx_path: Path | str = "mlx_model",
    quantize: bool = False,
    q_group_size: int | None = None,
    q_bits: int | None = None,
    q_mode: str | None = "affine",
    dtype: str | None = None,
    upload_repo: str | None = None,
    revision: str | None = None,
    dequantize: bool = False,
    quant_predicate: Predicate | str | None = None,
    trust_remote_code: bool = False,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Write to the new folder `mlx_path` what a checkpoint becomes; `dry_run` only says what that is.

    `hf_path` is a folder, or the name of a repository of the hub (a string); arguments are mlx-lm's, in its order.
    `quant_predicate`: a mixture of two widths by layer (mixed_2_6, mixed_3_4, mixed_3_6, mixed_4_6), or a function of a
    module's path and shape that returns True, False, or {"bits", "group_size", perhaps "mode"}. Width and group are the
    mode's own if they are not given. `dtype` is that of all that is not codes; by default what config.json says.
    progress(done, total) counts bytes written. Nothing is uploaded, and `trust_remote_code` changes nothing: no code of
    a model is ever run.
    """
    if upload_repo is not None:
        raise ValueError("convert: upload_repo is not taken: upload the folder yourself (`hf upload`)")
    general = asked_format(quantize, q_bits, q_group_size, q_mode, quant_predicate, dequantize)
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"convert: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    source = hf_path if isinstance(hf_path, Path) else hub.locate(hf_path, revision=revision)
    target = Path(mlx_path)
    saving.check_target(source, target)
    plan = planning.make(originals.open(source), general, quant_predicate, dtype, dequantize)
    if not dry_run:
        run(plan, target, progress)
    return plan


def asked_format(
    quantize: bool,
    bits: int | None,
    group: int | None,
    mode: str | None,
    predicate: Predicate | str | None,
    dequantize: bool,
) -> Format | None:
    """The general format that the options ask for; None without quantisation."""
    if quantize and dequantize:
        raise ValueError("convert: quantize and dequantize exclude each other")
    if not quantize:
        options = {
            "q_bits": bits,
            "q_group_size": group,
            "q_mode": None if mode == "affine" else mode,
            "quant_predicate": predicate,
        }
        for name, given in options.items():
            if given is not None:
                raise ValueError(f"convert: {name} counts only with quantize")
        return None
    mode = "affine" if mode is None else mode
    if mode not in DEFAULTS:
        raise ValueError(f"convert: q_mode must be one of {', '.join(DEFAULTS)}, got {mode!r}")
    if isinstance(predicate, str) and predicate not in MIXED:
        raise ValueError(f"convert: quant_predicate must be one of {', '.join(MIXED)}, got {predicate!r}")
    if isinstance(predicate, str) and mode != "affine":
        raise ValueError(f"convert: {predicate} mixes affine formats; q_mode cannot be {mode}")
    default_bits, default_group = DEFAULTS[mode]
    format = Format(default_bits if bits is None else bits, default_group if group is None else group, mode)
    require_format("convert", *format)
    return format


def run(plan: Plan, target: Path, progress: Progress | None = None) -> None:
    with saving.aside(target) as folder:
        saving.require_space(folder, plan.need)
        for path in plan.copies:
            saving.copy_file(plan.original.folder / path, folder / path)
        saving.write_json(folder / "config.json", tagged(plan.config))
        saving.write_json(folder / checkpoints.INDEX, plan.layout.index(plan.parameters))
        done, total = 0, plan.bytes_after
        with saving.Writer(folder, plan.layout) as writer:
            for change in plan.changes:
                for slot, row, rows in change.parts():
                    writer.write(slot, row, rows)
                    done += rows.nbytes
                    if progress is not None:
                        progress(done, total)
        check(folder)


def check(folder: Path) -> None:
    """What was written must load: headers are read back, and the model built as a skeleton."""
    checkpoint = checkpoints.open(folder, set(MODELS))
    weights = checkpoint.weights("meta")
    weights.finish(MODELS[checkpoint.config.model_type](checkpoint.config, weights).further_layers)


def tagged(value: Any) -> Any:
    """Numbers that JSON has not, as mlx-lm writes them: {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        return {key: tagged(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [tagged(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    return value
