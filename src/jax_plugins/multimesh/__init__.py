"""Start-up: chooses the devices that JAX starts with.

    from jax_plugins.multimesh import init
    init(cpus=8)

Nothing here imports JAX before it is needed: `init` works before and after `import jax`, until JAX
has started its devices. JAX finds this module as a plugin and calls `initialize`, which does
nothing: MultiMesh is no backend, it runs on the backends of stock JAX.
"""

import gc
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from multimesh._src.errors import InitError, message

__all__ = ["init", "initialize"]

_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
_LOG_LEVELS = {"info": "INFO", "debug": "DEBUG", "spew": "DEBUG"}
# What only the runtime of the original MultiMesh had, and what to use on stock JAX.
_LEGACY = {
    "fbmem": "set the environment variable `XLA_PYTHON_CLIENT_MEM_FRACTION`",
    "sysmem": "drop it: JAX takes host memory as needed",
    "zcmem": "drop it: pinned host memory is a memory kind, `sharding.with_memory_kind`",
    "realm_argv": "set the environment variable `XLA_FLAGS`",
    "network": "drop it: processes are connected by `distributed=True` (`jax.distributed`)",
    "kthreads": "drop it: XLA sizes its thread pools itself",
}

_first_call: dict[str, Any] | None = None


def initialize() -> None:
    """Does nothing. JAX calls it when it looks for plugins."""


def init(
    cpus: int | None = None,
    gpus: int | None = None,
    *,
    distributed: bool = False,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    initialization_timeout: int = 300,
    heartbeat_timeout: int = 100,
    coordinator_bind_address: str | None = None,
    cluster_detection_method: str | None = None,
    debug: str | None = None,
    dump: str | os.PathLike[str] | None = None,
    dump_all_passes: bool = False,
    profile: bool = False,
    disable_gc: bool | None = None,
    **legacy: Any,
) -> None:
    """Chooses the devices of this process, before JAX starts them.

    A second call with equal values does nothing.

    Args:
        cpus: Makes the CPU the only platform, with so many devices.
        gpus: Makes the first so many GPUs visible.
        distributed: Connects several processes by `jax.distributed.initialize`, which gets the
            next eight arguments.
        coordinator_address: Host and port of process 0.
        num_processes: Number of processes.
        process_id: Number of this process, from 0.
        local_device_ids: The devices of this process.
        initialization_timeout: Seconds to wait for all processes.
        heartbeat_timeout: Seconds after which a silent process counts as dead.
        coordinator_bind_address: Where process 0 listens.
        cluster_detection_method: How JAX finds the other processes.
        debug: Log level: `"info"`, `"debug"` or `"spew"` (also XLA's logs).
        dump: A directory into which every phase of the compiler writes its program.
        dump_all_passes: Writes the program after every pass too.
        profile: Names every call, run and copy of a step in the traces of `jax.profiler`.
        disable_gc: True switches Python's cyclic garbage collection off, False on.
        **legacy: `fbmem`, `sysmem`, `zcmem`, `realm_argv`, `network`, `kthreads`: accepted from
            older programs, without effect.

    Raises:
        InitError: JAX has started its devices already, an earlier call had other values, or the
            values exclude each other.
        TypeError: There is no such argument.
    """
    global _first_call
    values = {name: value for name, value in locals().items() if name != "legacy"}
    _warn_of_legacy(legacy)
    if _first_call == values:
        return
    _check_values(values)
    _check_first(values)
    _check_no_backend()
    _choose_devices(cpus, gpus)
    _choose_output(debug, dump, dump_all_passes, profile)
    if disable_gc is not None:
        gc.disable() if disable_gc else gc.enable()
    if distributed:
        _connect(values)
    _first_call = values


def _warn_of_legacy(legacy: dict[str, Any]) -> None:
    unknown = sorted(set(legacy) - set(_LEGACY))
    if unknown:
        raise TypeError(f"init() got an unexpected keyword argument {unknown[0]!r}")
    for name in legacy:
        warnings.warn(
            f"`init({name}=...)` has no effect on stock JAX: {_LEGACY[name]}.",
            DeprecationWarning,
            stacklevel=3,
        )


def _check_values(values: dict[str, Any]) -> None:
    for name in ("cpus", "gpus"):
        count = values[name]
        if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
            raise InitError(f"`init({name}={count!r})`: it must be an integer.")
        if count is not None and count < 1:
            raise InitError(f"`init({name}={count})`: it must be at least 1.")
    if values["cpus"] is not None and values["gpus"] is not None:
        raise InitError(
            message(
                f"`init(cpus={values['cpus']}, gpus={values['gpus']})` asks for two platforms.",
                ways=("give `cpus=` to run on the CPU alone.", "give `gpus=` to run on GPUs."),
            )
        )
    if values["debug"] not in (None, *_LOG_LEVELS):
        raise InitError(f"`init(debug={values['debug']!r})`: it is one of {tuple(_LOG_LEVELS)}.")
    if values["dump_all_passes"] and values["dump"] is None:
        raise InitError("`init(dump_all_passes=True)` needs `dump=`, the directory to write to.")
    _check_distributed(values)


def _check_distributed(values: dict[str, Any]) -> None:
    names = ("coordinator_address", "num_processes", "process_id", "local_device_ids")
    given = [name for name in names if values[name] is not None]
    if given and not values["distributed"]:
        raise InitError(
            message(
                f"`init({given[0]}={values[given[0]]!r})` is given without `distributed=True`.",
                ways=("add `distributed=True`.", f"drop `{given[0]}`."),
            )
        )


def _check_first(values: dict[str, Any]) -> None:
    if _first_call is None:
        return
    name = next(name for name, value in values.items() if value != _first_call[name])
    raise InitError(
        message(
            f"`init` was called before with `{name}={_first_call[name]!r}`, now with "
            f"`{name}={values[name]!r}`.",
            ways=("call `init` once, or always with the same values.",),
        )
    )


def _check_no_backend() -> None:
    if "jax" not in sys.modules:
        return
    from multimesh._src.jax_compat.backends import backends_exist

    if backends_exist():
        jax = sys.modules["jax"]
        raise InitError(
            message(
                f"`init` is called too late: JAX has already started `{jax.device_count()}` "
                f"devices of platform `{jax.default_backend()}`.",
                ways=(
                    "call `init` at the top of the program, before the first JAX computation and "
                    "before `jax.devices()`.",
                    "restart the notebook's kernel and call `init` first.",
                ),
            )
        )


def _choose_devices(cpus: int | None, gpus: int | None) -> None:
    if cpus is not None:
        flags = os.environ.get("XLA_FLAGS", "").split()
        kept = [flag for flag in flags if not flag.startswith(_DEVICE_COUNT_FLAG)]
        if kept != flags:  # the older way to say it; both together are refused or ignored
            os.environ["XLA_FLAGS"] = " ".join(kept)
        _set_jax("jax_platforms", "cpu")
        _set_jax("jax_num_cpu_devices", cpus)
    if gpus is not None:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        if platforms and not set(platforms.split(",")) & {"gpu", "cuda", "rocm"}:
            raise InitError(
                message(
                    f"`init(gpus={gpus})` asks for GPUs, but `JAX_PLATFORMS={platforms}` excludes "
                    "them.",
                    ways=("unset `JAX_PLATFORMS`.",),
                )
            )
        for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            os.environ[variable] = _first_devices(variable, gpus)


def _first_devices(variable: str, count: int) -> str:
    """Returns the first so many of the devices that an environment variable lists."""
    listed = os.environ.get(variable)
    if listed is None:
        return ",".join(map(str, range(count)))
    visible = [entry.strip() for entry in listed.split(",") if entry.strip()]
    if len(visible) < count:
        raise InitError(
            f"`init(gpus={count})`: `{variable}={listed}` shows only `{len(visible)}` GPUs."
        )
    return ",".join(visible[:count])


def _set_jax(option: str, value: Any) -> None:
    """Sets an option of JAX: read from the environment by `import jax`, then by `config`."""
    os.environ[option.upper()] = str(value)
    if "jax" in sys.modules:
        sys.modules["jax"].config.update(option, value)


def _choose_output(
    debug: str | None,
    dump: str | os.PathLike[str] | None,
    dump_all_passes: bool,
    profile: bool,
) -> None:
    if debug is not None:
        _set_jax("jax_logging_level", _LOG_LEVELS[debug])
        logging.getLogger("multimesh").setLevel(_LOG_LEVELS[debug])
    if debug == "spew":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
        os.environ["TF_CPP_MAX_VLOG_LEVEL"] = "1"
    if dump is not None:
        os.environ["MULTIMESH_DUMP"] = os.fspath(dump)
    if dump_all_passes:
        os.environ["MULTIMESH_DUMP_ALL_PASSES"] = "1"
    if profile:
        os.environ["MULTIMESH_PROFILE"] = "1"


def _connect(values: dict[str, Any]) -> None:
    import jax

    jax.distributed.initialize(
        coordinator_address=values["coordinator_address"],
        num_processes=values["num_processes"],
        process_id=values["process_id"],
        local_device_ids=values["local_device_ids"],
        cluster_detection_method=values["cluster_detection_method"],
        initialization_timeout=values["initialization_timeout"],
        heartbeat_timeout_seconds=values["heartbeat_timeout"],
        coordinator_bind_address=values["coordinator_bind_address"],
    )
