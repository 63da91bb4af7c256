"""A step of a whole model with some of its settings changed, beside the step as it is: what a launch size is chosen by.

    python benchmarks/variants.py qwen3 --try without=routed_experts --try fused.combine_and_norm_kernel.num_warps=8
    python benchmarks/variants.py qwen3 --context 32768 --try attention.MOST=64
    python benchmarks/variants.py qwen3.5 --streams 32 --try quant.SEVERAL=32,fused.MANY_STATES=64

A variant is a list of settings, with commas: fusions to leave out (without=name+name), a number of a file of kernels
(file.NAME=value), or an option of a kernel's launches (file.kernel.option=value: num_warps, num_stages, maxnreg).
Random weights at the published shapes; kernels are compiled first, by many processes at once. Times are of the device,
the median of rounds in which variants take turns.
"""

import argparse
import ast
import statistics
import sys
from contextlib import ExitStack, contextmanager
from importlib import import_module

import measurements
import torch
from h200 import NAMES, layers_that_fit
from random_models import build
from side_by_side import side_by_side

from halfbyte import cuda, fusion
from halfbyte.errors import UsageError

ROUNDS, REPLAYS = 5, 48


class Launched:
    """A kernel whose launches get one more option."""

    def __init__(self, kernel, option, value):
        self.kernel, self.given = kernel, {option: value}

    def __getitem__(self, grid):
        return lambda *args, **options: self.kernel[grid](*args, **(options | self.given))


@contextmanager
def replaced(holder, name, value):
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def changes(text):
    """What a variant sets: (holder, name, value). One that cannot be is said, and ends the program."""
    for setting in filter(None, text.split(",")):
        path, _, value = setting.partition("=")
        try:
            if path == "without":
                yield fusion, "WITHOUT", fusion.left_out(value.split("+"))
                continue
            file, name, *option = path.split(".")
            module = import_module(f"halfbyte.kernels.triton.{file}")
            now, wanted = getattr(module, name), ast.literal_eval(value)
        except (AttributeError, ImportError, SyntaxError, UsageError, ValueError) as error:
            sys.exit(f"{setting!r} ({error}): say without=fusion, file.NAME=value or file.kernel.option=value")
        yield module, name, Launched(now, option[0], wanted) if option else wanted


def prepared(model, text, streams, context):
    """A step that is recorded, fused and captured with these settings, and keeps them."""
    with ExitStack() as stack:
        for change in changes(text):
            stack.enter_context(replaced(*change))
        return measurements.prepared(model, streams, context)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=NAMES)
    parser.add_argument("--try", dest="variants", action="append", default=[], metavar="SETTINGS")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, help="so many of them instead of all that fit")
    parser.add_argument("--processes", type=int, default=20, help="that compile at once; 0: all in this one")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    variants = ["", *args.variants]
    for text in variants:
        list(changes(text))
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device here, and steps of these models are timed on one")
    if args.one is not None:
        model, _ = build(NAMES[args.model], measurements.DEVICE, layers=measurements.FEW_LAYERS)
        return prepared(model, args.one, args.streams, args.context)
    if args.processes:
        shape = [args.model, "--streams", str(args.streams), "--context", str(args.context), "--one"]
        print(side_by_side([[sys.executable, __file__, *shape, text] for text in variants], args.processes, 150))
    name = NAMES[args.model]
    model, _ = build(name, measurements.DEVICE, layers=args.layers or layers_that_fit(name))
    steps = [prepared(model, text, args.streams, args.context) for text in variants]
    rounds = [[cuda.timed(step.launch, REPLAYS) * 1e6 for step in steps] for _ in range(ROUNDS)]
    plain, *_ = medians = [statistics.median(each) for each in zip(*rounds, strict=True)]
    print(f"{args.model}, {args.streams} streams at {args.context}, us a step")
    for text, median, each in zip(variants, medians, zip(*rounds, strict=True), strict=True):
        spread = f"{min(each):.1f} to {max(each):.1f}"
        print(f"{median:9.1f}  {median - plain:+7.1f}  {spread:>18}  {text or 'as it is'}")


if __name__ == "__main__":
    main()
