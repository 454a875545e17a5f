"""Which submesh each equation runs on: the hard part of partitioning.

`cloned` finds what needs no place because every user can make it for itself, `places` spreads
the seeds' submeshes over everything else, `sums` regroups sums across submeshes.
"""
