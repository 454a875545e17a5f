"""The public API of MultiMesh for JAX."""

from typing import NoReturn

from jax.experimental.custom_partitioning import custom_partitioning

from multimesh import __version__
from multimesh._src.config import (
    autoshard,
    context,
    enable_fast_path,
    enable_recomputation,
    enable_task_fusion,
    ignore_transforms,
    only_fuse_loop_tasks,
    recompute_from_arguments_if_cost_less_than,
    replicate_parameters_smaller_than_num_elements,
)
from multimesh._src.frontend.batches import MicrobatchedArray, prepare_batch
from multimesh._src.frontend.contexts import Context, clear_tasks, register_task, tasks
from multimesh._src.frontend.logical import with_sharding_constraint
from multimesh._src.frontend.markers import task
from multimesh._src.frontend.microbatching import microbatch
from multimesh._src.frontend.multi_mesh import MultiMesh, slice_global_mesh
from multimesh._src.frontend.shard_maps import shard_map
from multimesh._src.frontend.tasks import Task, TaskMesh
from multimesh._src.staging.in_place import init
from multimesh._src.staging.mjit import mjit
from multimesh._src.staging.parallelize import parallelize
from multimesh._src.staging.served import serve_jit

__all__ = [
    "Context",
    "MicrobatchedArray",
    "MultiMesh",
    "Task",
    "TaskMesh",
    "__version__",
    "autoshard",
    "clear_tasks",
    "context",
    "custom_partitioning",
    "enable_fast_path",
    "enable_recomputation",
    "enable_task_fusion",
    "ignore_transforms",
    "init",
    "microbatch",
    "mjit",
    "only_fuse_loop_tasks",
    "parallelize",
    "prepare_batch",
    "recompute_from_arguments_if_cost_less_than",
    "register_task",
    "replicate_parameters_smaller_than_num_elements",
    "shard_map",
    "slice_global_mesh",
    "task",
    "tasks",
    "with_sharding_constraint",
]

serve_jit()

_NOT_CARRIED_OVER = {
    "shutdown": "there is no runtime of its own to shut down; drop the call",
    "set_startup_config": "use `jax_plugins.multimesh.init`",
    "compile_hlo_module": "use `multimesh.jax.mjit(f).lower(...).compile()`",
    "no_op_custom_call": "use `jax.named_scope` to mark code and `register_task` to place it",
    "register_custom_call_target": "use `jax.ffi.register_ffi_target`",
}


def __getattr__(name: str) -> NoReturn:
    if name in _NOT_CARRIED_OVER:
        raise AttributeError(
            f"`multimesh.jax.{name}` belonged to the original's C++ runtime and does not exist on "
            f"stock JAX: {_NOT_CARRIED_OVER[name]}."
        )
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
