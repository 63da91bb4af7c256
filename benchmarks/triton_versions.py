"""Steps of whole models by kernels that another Triton compiled, on a GPU machine that has only one Triton.

    python benchmarks/triton_versions.py record FILE               on that machine: which kernels the steps launch
    python benchmarks/triton_versions.py compile FILE FOLDER       where the other Triton is; no GPU is needed
    python benchmarks/triton_versions.py run FOLDER [FOLDER ...]   on that machine: the same steps by them, in turns

--models qwen3.5 qwen3     these models, random weights at the published shapes
--streams 1 8              texts of a step, each 1024 tokens long
--layers N                 so many of a model's layers instead of all

Whatever a folder does not have runs as this Triton compiles it, and is counted. Logits are compared: the same inputs
must give the same numbers, up to rounding. Times are of the device, the median of rounds in which they take turns.
"""

import argparse
import hashlib
import json
import os
import pickle
import statistics
import sys
from contextlib import contextmanager, suppress
from multiprocessing import Pool
from pathlib import Path

import torch
import triton
from random_models import build
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction

sys.path.append(str(Path(__file__).parents[1]))

from halfbyte.kernels.triton.compiling import Kernel

ROUNDS, REPLAYS, CONTEXT = 5, 48, 1024
NOTED = "kernels.pickle"  # in a folder: which kernels its files are
MATTER = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion", "launch_pdl", "num_ctas")  # of a launch's options
SCRATCH = [f"{kind}_scratch_{what}" for kind in ("global", "profile") for what in ("size", "align")]
TAKEN = ("name", "shared", *SCRATCH)  # of what the other Triton says of a kernel
ALIKE = 3e-2  # of the logits' norm: as far as roundings in another order may bring a step of bfloat16


def label(function, signature, constexprs, options, attrs):
    """What tells a kernel from all others, whichever Triton compiles it."""
    matter = {name: options[name] for name in MATTER if options.get(name) is not None}
    said = f"{function.fn.__module__} {function.fn.__qualname__} {signature} {constexprs} {attrs} {matter}"
    return hashlib.sha256(said.encode()).hexdigest()


@contextmanager
def compiled_otherwise(meet):
    """Inside, every kernel that is compiled goes through meet(label, noted, kernel); outside, all are as they were."""
    compile, touched = JITFunction._do_compile, set()

    def met(self, key, signature, device, constexprs, options, attrs, warmup):
        touched.add(self)
        kernel = compile(self, key, signature, device, constexprs, options, attrs, warmup)
        given = {name: options.__dict__[name] for name in MATTER if name in options.__dict__}
        noted = Kernel(self, signature, constexprs, given, attrs, None)
        meet(label(self, signature, constexprs, given, attrs), noted, kernel)
        return kernel

    clear(seen())
    JITFunction._do_compile = met
    try:
        yield
    finally:
        JITFunction._do_compile = compile
        clear(touched)


def seen():
    """All kernels of this project that were imported."""
    modules = [module for name, module in sys.modules.items() if name.startswith("halfbyte.kernels.triton")]
    return {value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)}


def clear(functions):
    for function in functions:
        function.device_caches.clear()


def record(args):
    """Write every kernel that the steps launch, and what it is compiled for."""
    kept = {}
    with compiled_otherwise(lambda key, noted, _: kept.setdefault(key, noted)):
        for model, _, streams in subjects(args, layers=2):
            step_of(model, streams)
    Path(args.file).write_bytes(pickle.dumps(list(kept.items())))
    print(f"{len(kept)} kernels, Triton {triton.__version__}")


def compile_for(job):
    """Compile a kernel into the folder; returns what is wrong with it."""
    key, noted, capability, folder = job
    target = GPUTarget("cuda", capability, 32)
    known = make_backend(target).parse_options({}).__dict__
    options = {name: value for name, value in noted.options.items() if name in known}
    try:
        kernel = triton.compile(noted.source, target=target, options=options)
    except Exception as error:
        return f"{noted.name}: {type(error).__name__}: {str(error)[:300]}"
    metadata = {name: getattr(kernel.metadata, name, None) for name in TAKEN}
    (folder / f"{key}.cubin").write_bytes(kernel.asm["cubin"])
    (folder / f"{key}.json").write_text(json.dumps(metadata | {"triton": triton.__version__}))
    return ""


def compile_all(args):
    folder, kernels = Path(args.folders[0]), pickle.loads(Path(args.file).read_bytes())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NOTED).write_bytes(pickle.dumps(kernels))
    with Pool(os.cpu_count()) as pool:
        said = pool.map(compile_for, [(*one, args.capability, folder) for one in kernels], chunksize=1)
    wrong = [one for one in said if one]
    print("\n".join([*wrong, f"{len(kernels) - len(wrong)} of {len(kernels)} compiled by Triton {triton.__version__}"]))
    return int(bool(wrong))


def compile_here(job):
    """Have a kernel in this Triton's cache; one that cannot be is compiled when it is launched."""
    _, noted, capability = job
    noted.target = GPUTarget("cuda", capability, 32)
    with suppress(Exception):
        noted.compile()


class Others:
    """The kernels of a folder, given to those that are compiled here."""

    def __init__(self, folder):
        self.folder, self.replaced, self.missing = Path(folder), 0, []

    def __call__(self, key, noted, kernel):
        path = self.folder / f"{key}.json"
        if not path.exists():
            self.missing.append(noted.name)
            return
        metadata = {name: value for name, value in json.loads(path.read_text()).items() if value is not None}
        fields = {name: value for name, value in metadata.items() if name in kernel.metadata._fields}
        kernel.metadata = kernel.metadata._replace(**fields)
        kernel.packed_metadata = make_backend(kernel.metadata.target).pack_metadata(kernel.metadata)
        kernel.name = kernel.metadata.name
        kernel.kernel = path.with_suffix(".cubin").read_bytes()
        self.replaced += 1


def subjects(args, layers=None):
    from h200 import NAMES, layers_that_fit

    for model in args.models:
        name = NAMES[model]
        built, _ = build(name, "cuda", layers=layers or args.layers or layers_that_fit(name))
        for streams in args.streams:
            yield built, model, streams


def step_of(model, streams):
    """A step that is recorded, fused and captured, and its logits; each time it went on from the same state."""
    from measurements import CHUNK, HEADROOM
    from random_models import fill

    from halfbyte.decoding import DecodeStep

    torch.manual_seed(5)
    cache = model.new_cache(streams, CONTEXT + HEADROOM, chunk=CHUNK)
    fill(cache, CONTEXT)
    step, texts = DecodeStep(model, cache, streams), range(streams)
    before = [cache.snapshot(text) for text in texts]
    for _ in range(3):
        for text, state in zip(texts, before, strict=True):
            cache.restore(text, state)
        step.bind(texts, [17 + text for text in texts])
        step.launch().tolist()
    return step, step.logits.to(torch.float32, copy=True)


def run(args):
    from halfbyte import cuda

    kernels = pickle.loads((Path(args.folders[0]) / NOTED).read_bytes())
    with Pool(os.cpu_count()) as pool:  # while no GPU is in use, which a fork would not survive
        pool.map(compile_here, [(*one, args.capability) for one in kernels], chunksize=1)
    wrong = False
    for model, name, streams in subjects(args):
        made, said = [step_of(model, streams)], [f"Triton {triton.__version__}"]
        for folder in args.folders:
            others = Others(folder)
            with compiled_otherwise(others):
                made.append(step_of(model, streams))
            said.append(f"{folder}: {others.replaced} kernels of it, none for {sorted(set(others.missing))}")
        steps, logits = zip(*made, strict=True)
        rounds = [[cuda.timed(step.launch, REPLAYS) * 1e6 for step in steps] for _ in range(ROUNDS)]
        print(f"{name}, {streams} streams at {CONTEXT}: us a step, and how far its logits are from this Triton's")
        for line, times, given in zip(said, zip(*rounds, strict=True), logits, strict=True):
            away = float((given - logits[0]).norm() / logits[0].norm())
            wrong |= not away < ALIKE
            spread = f"{min(times):8.1f} to {max(times):8.1f}"
            print(f"{statistics.median(times):9.1f}  {spread}  {away:.1e}  {line}", flush=True)
    return int(wrong)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compile", "run"))
    parser.add_argument("file", help="of kernels; where steps are run, the first folder")
    parser.add_argument("folders", nargs="*")
    parser.add_argument("--models", nargs="+", default=["qwen3.5", "qwen3"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--capability", type=int, default=90, help="of the GPU to compile for")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    if args.what == "run":
        args.folders.insert(0, args.file)
    return {"record": record, "compile": compile_all, "run": run}[args.what](args)


if __name__ == "__main__":
    sys.exit(main())
