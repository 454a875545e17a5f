"""Whether JAX has started a backend: from then on platforms and device counts are fixed.

Checked on jax 0.10.2, 0.11.2 and 0.12.0.1. Private name: `jax._src.xla_bridge.
backends_are_initialized`. Without it the answer is "no"; JAX then refuses a late change of the
number of CPU devices itself.
"""

import contextlib
from typing import Any

from multimesh._src.jax_compat import private

backends_are_initialized: Any = None
if private.ALLOWED:
    with contextlib.suppress(ImportError):  # unknown newer JAX
        from jax._src.xla_bridge import backends_are_initialized


def backends_exist() -> bool:
    """Returns whether some backend has been started in this process."""
    return backends_are_initialized is not None and backends_are_initialized()
