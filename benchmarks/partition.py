"""Partition: what cutting a program costs, against JAX's own tracing and lowering of it.

A train step of a GPT (gradients of 16 microbatches, an sgd update) on four stages, at growing
numbers of layers. *jax* is `jax.jit(step).trace(...).lower()` of the same function; *ours* is all
from the end of the trace to the first compile of XLA: passes (Shardy's included) and lowerings of
the distinct tasks. Single passes are timed inside one run of them all. A second table counts
traces, lowerings and compiles at other numbers of microbatches and of equal layers.

Run it with `python benchmarks/partition.py [--equations 1000 --equations 10000] [--rounds 3]`.
"""

import argparse
import functools
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jax_plugins.multimesh import init

init(cpus=4)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from _models import GPT  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from multimesh._src.partition import pipeline  # noqa: E402
from multimesh._src.runtime import counters  # noqa: E402
from multimesh._src.runtime.buffers import plan_buffers  # noqa: E402
from multimesh._src.runtime.compile import stablehlo  # noqa: E402
from multimesh.jax import MultiMesh, microbatch, mjit  # noqa: E402

NUM_STAGES = 4
NUM_MICROBATCHES = 16
WIDTH = 8
EQUATIONS_A_LAYER = 230  # about: forward, backward, accumulation and update
PASSES = tuple(
    name
    for name, value in vars(pipeline).items()
    if callable(value)
    and getattr(value, "__module__", "").startswith("multimesh._src.partition.")
    and not isinstance(value, type)
    and name not in ("partition",)
)
