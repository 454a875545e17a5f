"""The errors that MultiMesh raises: one base class, subclasses by phase."""

from multimesh._src.errors import (
    ConfigError,
    DebugError,
    ExecutionError,
    InitError,
    MatchError,
    MeshError,
    MicrobatchError,
    MultiMeshError,
    NonFiniteError,
    PartitionError,
    ScheduleError,
    ShardingError,
    TraceError,
)

__all__ = [
    "ConfigError",
    "DebugError",
    "ExecutionError",
    "InitError",
    "MatchError",
    "MeshError",
    "MicrobatchError",
    "MultiMeshError",
    "NonFiniteError",
    "PartitionError",
    "ScheduleError",
    "ShardingError",
    "TraceError",
]
