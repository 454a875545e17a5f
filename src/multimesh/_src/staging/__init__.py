"""The top layer: functions that users call, glued from tracing, partitioning and the runtime."""
