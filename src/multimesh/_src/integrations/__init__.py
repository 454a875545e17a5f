"""Thin layers over libraries that users train with. Each imports its library only when used."""
