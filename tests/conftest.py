"""Common to all tests: nothing is fetched from the network; without a GPU, Triton kernels run in its interpreter."""

from __future__ import annotations

import os
import shutil

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if shutil.which("nvidia-smi") is None:
    # Triton reads it when it is first imported, by whichever test comes first in a process.
    os.environ["TRITON_INTERPRET"] = "1"
