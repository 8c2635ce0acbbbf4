"""The kernels run on the GPU, or where there is none under Triton's interpreter, which must be asked for first."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
