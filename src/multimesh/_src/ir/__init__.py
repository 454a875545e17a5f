"""The typed programs between the phases: traced equations, tasks and values, and the plan."""
