"""Recorded calls, bound: what their launchers hand to kernels is found out once, and then handed over by driver.py.

That holds for a launcher whose Python looks at shapes, addresses and settings, not at values: STEADY names them. The
launcher runs once with kernels that do nothing but note their arguments. The little that it does with torch on the way
is done by kernels too (copies.py); where it does more, the call stays what it is.
"""

import numba
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import OWN_THREADS
from .compiled import Unsteady, tracing
from .copies import add, copy, copy_into, take
from .driver import Beside, Launch, Program

HERE = __package__
CACHED = 1 << 23  # bytes of weights: with 5.5 MB parts are 1.2 to 1.5 times as fast, with 20.8 MB mostly slower
MOST = 4  # parts of a step: each is recorded for itself
STEADY = {
    "attention.attention", "attention.latent_attention", "cache.append", "experts.expert_mlp", "quant.embed",
    "quant.qmm", "recurrent.causal_conv", "recurrent.delta_gates", "recurrent.gated_delta", "routing.combine",
    "routing.route", "rowwise.glu", "rowwise.rms_norm", "rowwise.rope", "rowwise.softcap", "sampling.sample",
}  # fmt: skip
"""Launchers whose Python depends on no value that a kernel reads or writes, but for where it says `looks_at_values`.
A number that a kernel returns is 0 in the usual case, for which it is bound; where a replay gives another, they run."""
UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty"}


class Glue(TorchDispatchMode):
    """What a launcher does with torch: views and new memory stay as they are, copies are made by kernels.

    Constants that it makes stay as well: a steady launcher hands none to a kernel that writes to it.
    """

    def __init__(self):
        super().__init__()
        self.constant, self.held = set(), []  # kernels may know no more of a tensor than its address

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # as graph.Recorder does

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, given = func.overloadpacket.__name__, [one for one in args if isinstance(one, torch.Tensor)]
        if func._schema.is_mutable:
            done = {"copy_": copy_into, "add_": add}.get(name)
            if done is not None and len(given) == len(args) == 2 and not kwargs and done(*given):
                return args[0]
            raise Unsteady(name)
        if name == "index" and len(args[1]) == 1:  # by numbers that no kernel has written yet
            result = args[0].new_empty(args[1][0].shape + args[0].shape[1:])
        else:
            result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor):
            raise Unsteady(name)
        self.held.append(result)
        here = result.untyped_storage().data_ptr()
        if name in UNWRITTEN or any(here == one.untyped_storage().data_ptr() for one in given):
            return result
        if all(one.untyped_storage().data_ptr() in self.constant for one in given):
            self.constant.add(here)
        elif not again(name, args, result):
            raise Unsteady(name)
        return result


def again(name, args, result):
    """Launch what gives a result of torch's; whether a kernel can do that."""
    if name in ("clone", "_to_copy"):
        return copy(args[0], result)
    return name == "index" and len(args[1]) == 1 and take(args[0], args[1][0], result)


def steady(one):
    """Whether a recorded call may be bound: a launcher of this folder, or an operation of torch's."""
    package, _, module = (getattr(one.run, "__module__", None) or "").rpartition(".")
    return isinstance(one.run, torch._ops.OpOverload) or (package == HERE and f"{module}.{one.run.__name__}" in STEADY)


def traced(calls):
    """Of each call its kernels in order, as (compiled code, arguments, what must live as long); None where it stays
    what it is."""
    found = []
    with tracing() as noted:
        for one in calls:
            noted.clear()
            kernels = None
            if steady(one):
                try:
                    with Glue() as glue:
                        one.run(*one.args, **one.kwargs)
                    kernels = [(*each, glue.held) for each in noted]
                except Unsteady:
                    pass
            found.append(kernels)
    return found


class Stretch:
    """Calls in a row whose kernels are all bound."""

    def __init__(self, calls, kernels):
        self.calls = calls
        self.program = Program([Launch(*one) for each in kernels for one in each])
        self.owner = [index for index, each in enumerate(kernels) for _ in each]
        self.ends = [sum(map(len, kernels[: index + 1])) for index in range(len(kernels))]

    def __call__(self):
        self.go_on(self.program.run())

    def go_on(self, stopped):
        """From where it has stopped to the end."""
        while stopped < self.program.end:  # something unusual: its call, from the beginning, by its launcher
            index = self.owner[stopped]
            one = self.calls[index]
            one.run(*one.args, **one.kwargs)
            stopped = self.program.run(self.ends[index])


def fits(weight_bytes):
    """Whether a model is so small that Python around a step costs more than some rows that fill the step up."""
    return weight_bytes <= CACHED


def shares(rows, weight_bytes):
    """In how many parts a step of so many rows is computed, each by a thread of its own, first call to last.

    Then no core waits for another inside of a step, nor reads what another has just written; but each reads all
    weights, which from memory would take longer than it saves.
    """
    return min(rows, numba.get_num_threads(), MOST) if OWN_THREADS and fits(weight_bytes) else 1


def bind(calls):
    """What runs recorded calls, in as few calls of machine code as may be."""
    parts = stretches(calls)

    def run():
        for part in parts:
            part()

    return run


def bind_beside(lists):
    """What runs lists of recorded calls, each on a thread; None where one of them is more than one call."""
    bound = [stretches(calls) for calls in lists]
    if not all(len(parts) == 1 and isinstance(parts[0], Stretch) for parts in bound):
        return None
    whole = [stretch for (stretch,) in bound]
    programs = Beside([one.program for one in whole])

    def run():
        for one, stopped in zip(whole, programs.run(), strict=True):
            one.go_on(stopped)

    return run


def stretches(calls):
    """Recorded calls as few things to call: stretches of those that can be bound, and the others."""
    parts, stretch = [], []
    for one, kernels in [*zip(calls, traced(calls), strict=True), (None, None)]:
        if kernels is not None:
            stretch.append((one, kernels))
            continue
        if stretch:
            parts.append(Stretch(*map(list, zip(*stretch, strict=True))))
            stretch = []
        if one is not None:
            parts.append(lambda one=one: one.run(*one.args, **one.kwargs))
    return parts
