"""Ready training set-ups on real bundled data, and the code that runs and measures them."""

from halfstep.recipes.registry import RECIPES, Recipe, Task, recipe_of

__all__ = ["RECIPES", "Recipe", "Task", "recipe_of"]
