"""Choosing level, layout and precision by module on the machine at hand: `tune` and `level="auto"`."""
