"""How calls are compared: what a norm does beside norming, and whether two calls are alike."""

from __future__ import annotations

from torch import Tensor

from ..graph import Call

NORM_OPTIONS = ("add", "mul", "gate", "residual", "scale", "return_sum", "extra_dtype", "head_major")


def options(norm: Call) -> set[str]:
    """What a rms_norm does beside norming."""
    given = ((name, norm.kwargs.get(name)) for name in NORM_OPTIONS)
    return {name for name, value in given if value is not None and value is not False}


def language(one: Call) -> str:
    """That of a kernel: halfbyte.kernels.<language>.<family>."""
    return one.run.__module__.split(".")[2]


def alike(one: Call, other: Call, given: int) -> bool:
    """Whether two calls of an op differ in nothing but their first arguments, `given` many, and their results."""
    settings = [{**dict(enumerate(each.args[given:])), **each.kwargs, "out": None} for each in (one, other)]
    return settings[0].keys() == settings[1].keys() and all(
        a.data_ptr() == b.data_ptr() if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b
        for a, b in ((settings[0][name], settings[1][name]) for name in settings[0])
    )
