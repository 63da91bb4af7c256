"""`halfbyte bench --explain`: the calls of a decode step, a line a kind, and what each costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..errors import size
from ..progress import counter, say
from .table import Table

if TYPE_CHECKING:
    from ..bench_model import Trial
    from ..explain import Explanation, Line
    from ..models.decoder import Decoder

COLUMNS = {
    "calls": 5, "op": 17, "fused from": 36, "result": 20, "bytes": 10, "flops": 7, "us": 8, "in all": 8,
    "of step": 7, "of floor": 8,
}  # fmt: skip
BUSY = "; busy: other processes took CPU time, alone it is faster"
WORDS = ("op", "fused from", "result")


def new_table(form: str) -> Table:
    return Table(form, COLUMNS, WORDS, shown)


def show_steps(model: Decoder, trials: Iterable[Trial], facts: dict[str, Any], table: Table, each: bool) -> None:
    """The step of every trial: its depth and its streams."""
    given = {name: facts[name] for name in ("model", "backend", "dtype")}
    for trial in trials:
        found = explained(model, trial, facts["floor_gbps"], each)
        streams = "one stream" if trial.streams == 1 else f"{trial.streams} streams"
        table.head(f"{facts['model']}, {facts['backend']}, {facts['dtype']}: a token for {streams} at {trial.depth}")
        for line in (*found.lines, found.calls, found.step):
            table.add({**given, "n_depth": trial.depth, "n_batch": trial.streams, **row(line, found.seconds)})
        say(how(found, model.device.type))


def explained(model: Decoder, trial: Trial, floor_gbps: float, each: bool) -> Explanation:
    from ..bench_model import Reporter, fill
    from ..explain import explain

    cache = model.new_cache(trial.streams, trial.length)
    if trial.depth:
        fill(model, cache, trial.depth, Reporter(counter("filling the cache", "tokens"), trial.depth))
        filled = cache.snapshot(0)
        for slot in range(1, trial.streams):
            cache.restore(slot, filled)
    rate = None
    if model.device.type == "cuda":
        from ..cuda import matmul_rate

        rate = matmul_rate()
    return explain(model, cache, floor_gbps * 1e9, rate, each=each)


def row(line: Line, step: float) -> dict[str, Any]:
    return {
        "calls": line.count, "op": line.op, "fused_from": list(line.parts) if len(line.parts) > 1 else [],
        "result": line.result, "bytes": round(line.bytes), "flops": round(line.flops), "us": 1e6 * line.seconds,
        "total_us": 1e6 * line.seconds * (line.count if line.parts else 1),
        "of_step": line.seconds * (line.count if line.parts else 1) / step,
        "of_floor": line.floor / line.seconds if line.seconds else None,
    }  # fmt: skip


def shown(row: dict[str, Any]) -> dict[str, str]:
    """The cells of a row for people."""
    several = bool(row["result"])  # the sums at the end are of all calls
    parts = (name if count == 1 else f"{name} x{count}" for name, count in Counter(row["fused_from"]).items())
    return {
        "calls": str(row["calls"]), "op": row["op"], "fused from": ", ".join(parts), "result": row["result"],
        "bytes": size(row["bytes"]), "flops": amount(row["flops"]),
        "us": f"{row['us']:.2f}" if several else "", "in all": f"{row['total_us']:.1f}",
        "of step": f"{row['of_step']:.1%}",
        "of floor": "" if row["of_floor"] is None else f"{row['of_floor']:.1%}",
    }  # fmt: skip


def amount(count: float) -> str:
    """1536 -> '1.5 k'; nothing for nothing."""
    units = ["", "k", "M", "G", "T"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.1f} {units[0]}" if count else ""


def how(found: Explanation, device: str) -> str:
    """What was measured, in a line; the calls apart take another time than the step."""
    way = "the calls of a kind as one graph" if device == "cuda" else "each call in its place in a step"
    said = (
        f"timed {way}: {1e6 * found.calls.seconds:.1f} us added up; the step, measured whole, takes "
        f"{1e6 * found.seconds:.1f} us{BUSY * found.busy}"
    )
    if found.python is not None:
        said += f"\nPython around a step: {1e6 * found.python:.1f} us, {found.python / found.seconds:.1%} of it"
    if (copies := found.copies) is None:
        return said
    return (
        f"{said}\nexperts from host memory: {size(round(copies.bytes))} a step in {1e6 * copies.seconds:.1f} us, "
        f"{copies.bytes / max(copies.seconds, 1e-12) / 1e9:.1f} GB/s, of which {1e6 * found.beside:.1f} us ran beside "
        "computing"
    )
