"""Cuts the placed equations into tasks: `groups` names them, `tasks` makes them acyclic."""
