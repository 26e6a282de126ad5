"""dsjax: DeepSeek inference in JAX.

`LLM` is the offline API, `dsjax serve` the server. Importing dsjax is light; JAX is loaded when LLM is first used.

GPU memory is taken as needed rather than in one block (dsjax sets XLA_PYTHON_CLIENT_PREALLOCATE=false unless you set
it), so that several engines can follow each other in one process and LLM.close() really gives memory back. JAX may use
95% of it (XLA_PYTHON_CLIENT_MEM_FRACTION, likewise). On a machine without an NVIDIA GPU, JAX's CUDA plugin is there to
compile for other machines: dsjax tells it not to look for CUDA's libraries (JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1,
likewise), which would end in a traceback.
"""

import os
from typing import TYPE_CHECKING

from dsjax.engine.sampling_params import SamplingParams
from dsjax.errors import DsjaxError

if TYPE_CHECKING:
    from dsjax.engine.llm import LLM

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
if not any(map(os.path.exists, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"))):
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

__version__ = "0.1.0"
__all__ = ["LLM", "DsjaxError", "SamplingParams", "__version__"]


def __getattr__(name: str):
    if name == "LLM":
        from dsjax.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'dsjax' has no attribute {name!r}")
