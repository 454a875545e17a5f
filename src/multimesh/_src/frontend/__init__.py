"""What users write: contexts, tasks, matchers, markers; and tracing, which reads it."""
