"""Which row of the paper a run reproduces; only that row's results may be shown beside it."""

from grassy import paper
from grassy.recipes.files import load_recipe, recipe_names
from grassy.recipes.recipe import saved_recipe
from grassy.runs.weights import Description

#: The first class of ImageNet-1K, as a folder name and in Hugging Face datasets.
FIRST_CLASS = ("n01440764", "tench")


def paper_row(about: Description) -> str:
    """The row of the paper that a run reproduces: its recipe is the row's, unchanged, and its data is ImageNet-1K.

    "" for any other run, such as one with a changed recipe or other data.
    """
    try:
        recipe = saved_recipe(about.recipe)
        row = recipe.paper
        unchanged = row in paper.rows() and row in recipe_names() and not load_recipe(row).differences(recipe)
    except ValueError:  # the recipe is damaged, or of a later version
        return ""
    return row if unchanged and _is_imagenet(about) else ""


def _is_imagenet(about: Description) -> bool:
    """Whether the classes are those of ImageNet-1K, judged by number and names."""
    first = about.class_names[0] if about.class_names else None
    return about.num_classes == 1000 and (first is None or first.split(",")[0] in FIRST_CLASS)
