"""`halfbyte bench`: how fast a model reads a prompt and writes a reply, and how near that is to what memory allows."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import size
from ..progress import bar, counter, kernels, passing, say
from .arguments import (
    DEFAULT_MODEL,
    add_cpu_activations,
    add_deterministic,
    add_memory,
    add_top_k_experts,
    allowed,
    require_device,
)
from .explaining import new_table, show_steps
from .numbers import at_least_one, counts, pair, seconds, whole
from .pull import located
from .table import FORMS, Table

if TYPE_CHECKING:
    from ..bench_model import Result, Trial
    from ..fitting import Allowed
    from ..model_proof import Proof
    from ..models.decoder import Decoder
    from ..residency import Reads

COLUMNS = {  # with the room that their cells usually take
    "model": 5, "size": 8, "params": 8, "backend": 7, "test": 16, "t/s": 16, "first token": 11, "GB/s": 6,
    "of floor": 8, "peak memory": 11,
}  # fmt: skip
WORDS = ("model", "backend", "test")  # stand to the left, numbers to the right


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Lists have commas: -p 128,512 -d 0,4096. `halfbyte bench ops` times single ops, `halfbyte bench load` the "
        "loading; each has its own --help. A model in a folder of such a name is ./ops."
    )
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL",
        help=f"folder of an MLX checkpoint, or owner/name on the hub (default: {DEFAULT_MODEL}, which comes along)",
    )  # fmt: skip

    def add(*names: str, type: Any, metavar: str = "N", **more: Any) -> None:
        parser.add_argument(*names, type=type, metavar=metavar, **more)

    add("-p", "--n-prompt", type=counts, action="extend", help="tokens of a prompt, 0 for none (default: 512)")
    add("-n", "--n-gen", type=counts, action="extend", help="tokens of a reply, 0 for none (default: 128)")
    add("-pg", type=pair, action="append", metavar="P,N", help="a prompt and its reply in one test, as 512,128")
    add("-d", "--n-depth", type=counts, action="extend", help="tokens that the text has already (default: 0)")
    add("-b", "--n-batch", type=at_least_one, action="extend", help="streams computed together (default: 1)")
    add("-r", "--repetitions", type=whole, default=5, help="turns of each test (default: 5)")
    add("-t", "--threads", type=at_least_one, action="extend", help="CPU threads (default: one a core)")
    add("--delay", type=seconds, default=0.0, metavar="S", help="seconds between two tests (default: 0)")
    parser.add_argument(
        "--explain", action="store_true",
        help="instead of tests: the calls of one decode step (-d, -b), what each is fused from, moves, computes, takes",
    )  # fmt: skip
    parser.add_argument("-v", "--verbose", action="store_true", help="with --explain: a line for every call")
    parser.add_argument(
        "--record-routes", type=Path, metavar="FILE",
        help="write down which experts the tests chose, for `halfbyte plan MODEL --trace FILE` (CPU)",
    )  # fmt: skip
    add_memory(parser)
    add_top_k_experts(parser)
    add_deterministic(parser)
    add_cpu_activations(parser)
    parser.add_argument("--no-warmup", action="store_true", help="let the first turn count, too")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the activations")
    parser.add_argument("-o", "--output", choices=FORMS, default="md", help="(default: md)")


def run(args: argparse.Namespace) -> int:
    """Measure a model on this machine: prompt (pp512) and reply (tg128) in tokens a second, mean ± deviation.

    First the model's kernels are held against its torch bodies; one that is WRONG is not timed, and the exit status
    is 1. GB/s is what a reply must read for a token, over the time it took; "of floor" is that in percent of what this
    machine reads at most, measured. First token: seconds from prompt to first token. A prompt is bound by arithmetic,
    so it has no GB/s; nor have several streams of a model with experts, which share those they both need.
    """
    from ..accounting import skeleton
    from ..bench_model import measure
    from ..compilation import compile_kernels
    from ..loading import load_model, pick_device
    from ..machine import use_threads

    require_device(args)
    try:
        for threads in args.threads or []:
            use_threads(threads)
    except ValueError as error:
        args.parser.error(f"argument --threads: {error}")
    folder = located(args.model, args)
    checkpoint, ledger, account = skeleton(folder)
    trials = chosen(args, account.context)
    require_recordable(args, bool(ledger.mixtures) and pick_device(args.device).type == "cpu")
    if args.explain and args.expert_cache is not None:
        args.parser.error("argument --explain: a step is explained with all experts in memory, without --expert-cache")
    progress, limits = bar(f"loading {args.model}"), allowed(args)
    model = load_model(
        folder, args.device, args.dtype, progress=progress, allowed=limits, top_k_experts=args.top_k_experts
    )
    if args.explain and model.residency is not None and model.residency.source == "disk":
        args.parser.error("argument --explain: a step is explained with all experts in memory, where some have no room")
    compile_kernels(model, kernels(model.device.type))
    form = "json" if args.json else args.output
    table = new_table(form) if args.explain else Table(form, COLUMNS, WORDS, shown)
    for threads in args.threads or [None]:
        if threads is not None:
            use_threads(threads)
        proof = proved(model, trials)
        if proof.wrong:
            finish(table)
            say(f"{args.model}  WRONG: {proof.wrong}; not timed")
            return 1
        facts = model_facts(args.model, folder, model, checkpoint.quantisation.general, account, proof, limits)
        if args.explain:
            show_steps(model, trials, facts, table, args.verbose)
            continue
        with recorded(args, model, len(ledger.mixtures)):
            for number, trial in enumerate(trials):
                time.sleep(args.delay if number else 0)
                progress = counter(trial.name, "tokens")
                before = None if model.residency is None else model.residency.reads
                result = measure(model, account, trial, args.repetitions, not args.no_warmup, progress)
                table.add(row(facts, result, reads_since(before, model)))
    finish(table)
    return 0


def require_recordable(args: argparse.Namespace, experts_on_cpu: bool) -> None:
    """What cannot be written down in the end is refused before anything is measured."""
    if args.record_routes is None:
        return
    if not experts_on_cpu:
        args.parser.error("argument --record-routes: it is for models with experts, on the CPU")
    folder = args.record_routes.absolute().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)) or args.record_routes.is_dir():
        args.parser.error(f"argument --record-routes: {args.record_routes} cannot be written")


def proved(model: Decoder, trials: list[Trial]) -> Proof:
    from ..model_proof import prove

    announce("checking the model against its torch bodies")
    proof = prove(model, [trial.streams for trial in trials])
    passing("")
    if proof.unchecked:
        calls = ", ".join(f"{count} of {op}" for op, count in proof.unchecked.items())
        say(f"memory has no room for the torch bodies of some calls, which are not checked: {calls}")
    return proof


@contextmanager
def recorded(args: argparse.Namespace, model: Decoder, layers: int) -> Iterator[None]:
    """The experts that are chosen inside the block go to the file of --record-routes, where it is given."""
    if args.record_routes is None:
        yield
        return
    from ..routes import Routes

    routes = Routes(model.fingerprint, layers, model.expert_count, model.experts_per_token)
    with routes.recording(model.layers):
        yield
    routes.save(args.record_routes)


def reads_since(before: Reads | None, model: Decoder) -> dict[str, Any]:
    """What experts elsewhere have meant for a test; null where they are all in memory, or none is on disk."""
    if model.residency is None or before is None:
        return {"expert_hit_rate": None, "disk_bytes_read": None, "disk_gbps": None}
    reads = model.residency.reads - before
    if model.residency.source != "disk":
        return {"expert_hit_rate": reads.hit_rate, "disk_bytes_read": None, "disk_gbps": None}
    rate = reads.bytes / reads.seconds / 1e9 if reads.seconds else None
    return {"expert_hit_rate": reads.hit_rate, "disk_bytes_read": reads.bytes, "disk_gbps": rate}


def announce(text: str) -> None:
    """What begins now and may take long: a passing line on a terminal, a line that stays elsewhere."""
    (passing if sys.stderr.isatty() else say)(text)


def chosen(args: argparse.Namespace, context: int) -> list[Trial]:
    """Every trial that was asked for, in the order of llama-bench; refused before a model is loaded."""
    from ..bench_model import Trial

    prompts, replies = (args.n_prompt or [512], args.n_gen or [128])
    if args.explain:
        from ..explain import ROOM

        prompts, replies, args.pg = [], [ROOM], []
    kinds = [(p, 0) for p in prompts if p] + [(0, n) for n in replies if n] + (args.pg or [])
    trials = [Trial(p, n, d, b) for d, b in product(args.n_depth or [0], args.n_batch or [1]) for p, n in kinds]
    if not trials:
        args.parser.error("arguments -p, -n, -pg: nothing is left to measure")
    for trial in trials:
        if trial.length > context:
            args.parser.error(f"{trial.name} makes a text of {trial.length} tokens, the model's context is {context}")
    return trials


def model_facts(
    name: str, folder: Path, model: Decoder, quantisation: dict[str, Any], account: Any, proof: Proof, limits: Allowed
) -> dict[str, Any]:
    """What stands in every row: build, machine, model. The read bandwidth is measured here, where there is room."""
    import torch

    from .. import __version__, machine, memory
    from ..ops.dispatch import LANGUAGE_OF, find
    from .plan import read_bandwidth

    announce("measuring the read bandwidth")
    measurable = {"cuda": True, "cpu": memory.available(torch.device("cpu")) >= machine.READ_BYTES}
    bandwidth = read_bandwidth(model.device.type) if measurable.get(model.device.type) else None
    passing("")
    language = LANGUAGE_OF[model.device.type]
    return {
        "build_commit": commit(), "version": __version__, "backend": machine.backend(model.device),
        "language": language if find(language, "quant", "qmm") else "torch", "device": str(model.device),
        "cpu": machine.cpu_name(),
        "gpu": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else None,
        "model": folder.resolve().name if Path(name).is_dir() else name, "model_type": account.model_type,
        "model_bytes": account.weights, "n_params": account.parameters,
        "bits": round(8 * account.weights / account.parameters, 2), "group_size": quantisation.get("group_size"),
        "dtype": str(model.dtype).removeprefix("torch."), "n_threads": torch.get_num_threads(),
        "ram_limit": limits.memory_limit or limits.ram, "gpu_limit": limits.gpu_memory,
        "error_ratios": proof.ratios, "floor_gbps": bandwidth and bandwidth / 1e9,
    }  # fmt: skip


def commit() -> str | None:
    """Of the source tree that this runs from; an installed package has none."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", root, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    except OSError:  # there is no git
        return None
    return done.stdout.strip() or None


def row(facts: dict[str, Any], result: Result, reads: dict[str, Any]) -> dict[str, Any]:
    """The keys of llama-bench, and ours. What has no meaning is null."""
    trial, rate, floor = result.trial, result.bytes_per_second, facts["floor_gbps"]
    on_gpu = facts["gpu"] is not None
    return {
        **facts, "test": trial.name, "n_prompt": trial.prompt, "n_gen": trial.reply, "n_depth": trial.depth,
        "n_batch": trial.streams, "avg_ts": result.mean, "stddev_ts": result.deviation, "samples_ts": result.rates,
        "ttft_ms": result.first and 1e3 * result.first, "peak_ram": None if on_gpu else result.peak,
        "peak_vram": result.peak if on_gpu else None, "busy": result.busy, "bytes_per_step": result.bytes_per_step,
        "gbps": rate and rate / 1e9, "of_floor": rate and floor and rate / 1e9 / floor, **reads,
        "time_iso": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def finish(table: Table) -> None:
    table.end()
    if disturbed := sum(row.get("busy", False) for row in table.rows):
        say(f"busy: other processes took CPU time from {disturbed} of {len(table.rows)} tests; alone they are faster")


def shown(row: dict[str, Any]) -> dict[str, str]:
    """The cells of a row for people; empty where a number would mean nothing."""

    def number(key: str, form: str) -> str:
        return "" if row[key] is None else form.format(row[key])

    return {
        "model": row["model"], "size": size(row["model_bytes"]), "params": f"{row['n_params'] / 1e6:,.1f} M",
        "backend": row["backend"], "test": row["test"], "t/s": f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}",
        "first token": number("ttft_ms", "{:.1f} ms"), "GB/s": number("gbps", "{:.2f}"),
        "of floor": number("of_floor", "{:.1%}"),
        "peak memory": size(row["peak_vram"] if row["peak_ram"] is None else row["peak_ram"]),
    }  # fmt: skip
