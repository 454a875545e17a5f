"""From a traced function to a plan: see `pipeline` for the passes in order."""
