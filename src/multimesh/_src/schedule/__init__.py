"""Pipeline schedules as pure data: made, checked, simulated and drawn without JAX."""
