"""The runtime: compiles a plan, moves its values, frees its buffers, and runs it."""
