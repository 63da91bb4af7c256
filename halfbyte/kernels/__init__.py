"""Speed only: one folder a language, the file names of `ops`. Kernels import torch and their language, nothing else."""
