"""The switch that turns private JAX names off.

With `MULTIMESH_NO_PRIVATE_JAX=1` in the environment, every entry of this package that has a public
fallback uses it, as it would on a JAX that has moved the private name. Tests use the switch.
"""

import os

ALLOWED = os.environ.get("MULTIMESH_NO_PRIVATE_JAX", "") in ("", "0")
