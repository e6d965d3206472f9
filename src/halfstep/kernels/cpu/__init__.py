"""Numba loops, equal bit for bit to the plain torch reference."""
