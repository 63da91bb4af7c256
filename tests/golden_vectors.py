"""The golden vectors: what each original Metal kernel computes, and how close to it a result must be.

A file holds a JSON header (kernel, cases) and the arrays of each case: `<case>.<buffer>` and, after the kernel has run,
`<case>.<buffer>.out`. Buffers are in, out or inout; scalars and the fields of structs stand in the header.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "data" / "kernels"
RTOL = 1e-5
STEP = {"f16": 2.0**-10, "bf16": 2.0**-7}  # one rounding of the narrow type
EXACT = ("i32", "u32")


@dataclass
class Vector:
    """One run of one kernel."""

    kernel: str
    meta: dict[str, Any]
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    scalars: dict[str, Any]

    def dtype(self, name: str) -> str:
        return next(b["dtype"] for b in self.meta["buffers"] if b["name"] == name)

    def tolerance(self, name: str) -> float:
        """RTOL, or what one rounding of a narrow output takes, or four times what float32 itself leaves open: the
        golden's distance from float64, and how far it moves when sums are ordered or contracted differently."""
        dtype = self.dtype(name)
        if dtype in STEP:
            return max(RTOL, STEP[dtype])
        spread = self.meta["fp_spread"].get(name, {}).get("rel", 0.0)
        return max(RTOL, 4 * self.meta["err_vs_f64"][name]["rel"], 4 * spread)

    def misses(self, got: dict[str, np.ndarray]) -> list[str]:
        """A line for every output with an element off by more than tolerance x max(|golden|, a thousandth of the
        largest golden). Integers, NaNs and infinities must be the same."""
        lines = []
        for name, golden in self.outputs.items():
            dtype = self.dtype(name)
            expected, result = decoded(golden, dtype).ravel(), decoded(np.asarray(got[name]), dtype).ravel()
            if expected.size != result.size:
                lines.append(f"{name}: {result.size} elements, expected {expected.size}")
                continue
            same = (expected == result) | (np.isnan(expected) & np.isnan(result))
            if dtype not in EXACT:
                floor = 1e-3 * np.max(np.abs(expected[np.isfinite(expected)]), initial=0.0)
                with np.errstate(invalid="ignore"):
                    distance = np.abs(expected - result)
                same |= distance <= self.tolerance(name) * np.maximum(np.abs(expected), floor)
            if not same.all():
                first = int(np.argmin(same))
                lines.append(
                    f"{name} of case {self.meta['case']} {self.meta['params']}: {(~same).sum()} of {same.size} off, "
                    f"first at {first}: {result[first]} for {expected[first]}"
                )
        return lines


def decoded(array: np.ndarray, dtype: str) -> np.ndarray:
    """An array's values in float64; bf16 is stored as uint16."""
    if dtype == "bf16" and array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def load(path: Path) -> Iterator[Vector]:
    """Every vector of a file."""
    with np.load(path) as arrays:
        header = json.loads(bytes(arrays["meta"]))
        for meta in header["cases"]:
            inputs, outputs, scalars = {}, {}, {}
            for buffer in meta["buffers"]:
                name, role, key = buffer["name"], buffer["role"], f"{meta['case']}.{buffer['name']}"
                if role in ("in", "inout"):
                    inputs[name] = arrays[key]
                if role in ("out", "inout"):
                    outputs[name] = arrays[f"{key}.out"]
                if role == "scalar":
                    scalars[name] = buffer["value"]
                if role == "struct":
                    scalars |= {f"{name}.{field}": value for field, _, value in buffer["fields"]}
            yield Vector(header["kernel"], meta, inputs, outputs, scalars)


def files() -> list[Path]:
    return sorted(FOLDER.glob("*.npz"))
