"""GPU kernels in Triton, one file a family as in `ops`. On CPU tensors they run in Triton's interpreter
(TRITON_INTERPRET=1), which is how they are tested where there is no GPU."""

import os

# Products and sums may contract to fused multiply-adds, as always so far; Triton 3.9 warns that this will change.
# Where each rounding counts, a launch says enable_fp_fusion=False.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
