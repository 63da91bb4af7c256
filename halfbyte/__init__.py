"""Runs quantised mixture-of-experts models of mlx's format, on the machine you have. Here: the public names."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what editors and mypy read; a test holds it equal to the list below
    from .conversion.converting import convert as convert
    from .engine import logits as logits
    from .generation import batch_generate as batch_generate
    from .generation import generate as generate
    from .generation import stream_generate as stream_generate
    from .loading import load as load
    from .loading import load_model as load_model
    from .ops.quant import Packed as Packed
    from .ops.quant import dequantize as dequantize
    from .ops.quant import quantize as quantize

__version__ = "0.1.0"

_HOME = {
    "load": "loading", "load_model": "loading", "logits": "engine", "generate": "generation",
    "stream_generate": "generation", "batch_generate": "generation", "convert": "conversion.converting",
    "quantize": "ops.quant", "dequantize": "ops.quant", "Packed": "ops.quant",
}  # fmt: skip

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    """PEP 562: `import halfbyte` stays instant, and a name costs its imports when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
