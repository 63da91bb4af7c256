"""An MLX checkpoint on disk: checked, named, and read as a model asks for it."""

from .folder import Checkpoint as Checkpoint
from .folder import open as open
from .weights import Weights as Weights
