"""The errors that MultiMesh raises: one base class, subclasses by phase."""

from multimesh._src.errors import (
    ConfigError,
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
