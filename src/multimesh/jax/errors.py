"""The errors that MultiMesh raises: one base class, subclasses by phase."""

from multimesh._src.errors import (
    CheckpointError,
    ConfigError,
    DebugError,
    ExecutionError,
    InitError,
    MatchError,
    MeshError,
    MicrobatchError,
    MissingCheckpointError,
    MissingPackageError,
    MultiMeshError,
    NonFiniteError,
    PartitionError,
    ScheduleError,
    ShardingError,
    TraceError,
)

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DebugError",
    "ExecutionError",
    "InitError",
    "MatchError",
    "MeshError",
    "MicrobatchError",
    "MissingCheckpointError",
    "MissingPackageError",
    "MultiMeshError",
    "NonFiniteError",
    "PartitionError",
    "ScheduleError",
    "ShardingError",
    "TraceError",
]
