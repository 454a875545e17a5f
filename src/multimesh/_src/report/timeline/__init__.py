"""What was measured of the calls of a step: data, analysis, and ways to look at it."""
