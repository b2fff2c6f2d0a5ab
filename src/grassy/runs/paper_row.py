"""Whose figures may stand beside a run: those of the paper's row that it repeats, and no others."""

from grassy import paper
from grassy.runs.recipe import saved_recipe
from grassy.runs.recipe_files import load_recipe, recipe_names
from grassy.runs.weights import Description

#: The first class of ImageNet-1K, as folders and as Hugging Face call it.
FIRST_CLASS = ("n01440764", "tench")


def paper_row(about: Description) -> str:
    """The row of the paper that a run repeats: its recipe is that of the row, unchanged, and its data is ImageNet-1K.

    Else "". A recipe that only began as that of a row, or other data, has nothing to do with the paper's figures.
    """
    try:
        recipe = saved_recipe(about.recipe)
        row = recipe.paper
        unchanged = row in paper.rows() and row in recipe_names() and not load_recipe(row).differences(recipe)
    except ValueError:  # of a recipe that a later version wrote, or a damaged one
        return ""
    return row if unchanged and _is_imagenet(about) else ""


def _is_imagenet(about: Description) -> bool:
    """Whether the classes are those of ImageNet-1K, as far as they have names."""
    first = about.class_names[0] if about.class_names else None
    return about.num_classes == 1000 and (first is None or first.split(",")[0] in FIRST_CLASS)
