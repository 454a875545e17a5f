"""Stacked layer parameters (R7): one array of all layers becomes one block per submesh.

`rows` knows which equations act row by row, `find` finds the stacks and who reads their rows,
`blocks` says which submesh keeps which rows, `split` rewrites the program on blocks, and
`boundary` tells what the caller's arguments and results become.
"""
