"""Examines a training: a recipe or a script, watched and traced, and the document of what was found."""
