"""`grassy import`: convert the checkpoints that the paper's authors released into timm models.

They are mmengine files with mmpretrain's names. Some layers need more than a new name. VGG's linear layers are
convolutions in timm. Swin merges patches in another channel order and counts a downsampling to the preceding stage.
DeiT3 may need its first norm in both places (see `_deit3`).
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from grassy import paper
from grassy.inference.hub import check_folder, write_timm_folder
from grassy.models import create_model, import_timm
from grassy.recipes.files import load_recipe, recipe_names
from grassy.recipes.recipe import Recipe
from grassy.runs.inert_pickle import read_tensors
from grassy.runs.weights import PREPARATION, Description

Tensors = dict[str, Tensor]
CLASSES = 1000  # of ImageNet-1K
#: Prefixes that the classifier's weight may have.
CLASSIFIERS = ("head.fc.", "head.layers.head.", "backbone.classifier.6.")
KNOWN = "ResNet50-D, ResNet101-D, ResNet152-D, VGG13-BN, Swin-T and DeiT3-S"


class Converted(NamedTuple):
    """Weights with timm's names. k: the dimension of the subspaces, or None for a linear classifier."""

    architecture: str  # as the names of recipes begin
    k: int | None
    weights: Tensors


def import_checkpoint(path: Path, folder: Path, recipe_name: str | None = None) -> str:
    """Write a released checkpoint to a folder for the Hub, and return a line that describes it.

    recipe_name: the row of the paper. It is required if the weights fit several rows.
    """
    check_folder(folder)
    found = convert(read_tensors(path))
    recipe_name = recipe_name or _only_row(found)
    recipe = load_recipe(recipe_name)
    _check_recipe(recipe, recipe_name, found)
    model = create_model(recipe.model, CLASSES, recipe.head, recipe.model_kwargs)
    try:
        model.load_state_dict(found.weights)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit timm's {recipe.model}: {str(error).splitlines()[-1].strip()}") from None
    description = Description(
        model=recipe.model,
        num_classes=CLASSES,
        head={"gamma": 25.0, **recipe.head} if found.k else recipe.head,
        model_kwargs=recipe.model_kwargs,
        class_names=_class_names(),
        img_size=recipe.test_size or recipe.img_size,
        **{name: getattr(recipe, name) for name in PREPARATION},
        recipe=dataclasses.asdict(recipe),
    )
    write_timm_folder(model.eval(), description, folder)
    figures = paper.figures(recipe.paper)
    return f"{folder}: {recipe.description} ({recipe_name}); the paper reports top-1 {figures['top1']:.2f}"


def _only_row(found: Converted) -> str:
    """The one row of the paper that the weights fit. Preprocessing and reported results depend on the row."""
    own = [name for name in recipe_names() if name.startswith(f"{found.architecture}-")]
    rows = [name for name in own if (recipe := load_recipe(name)).paper and _fits(recipe, name, found)]
    if not rows:
        raise ValueError(f"the checkpoint holds {_held(found)}, which is no row of the paper")
    if len(rows) > 1:
        raise ValueError(f"the checkpoint holds {_held(found)}: give its row as --recipe, one of {', '.join(rows)}")
    return rows[0]


def _held(found: Converted) -> str:
    return f"{found.architecture} with " + ("a linear classifier" if found.k is None else f"k = {found.k}")


def _fits(recipe: Recipe, name: str, found: Converted) -> bool:
    head = "linear" if found.k is None else "grassmann"
    same = recipe.head["name"] == head and recipe.head.get("k") == found.k
    return same and name.startswith(f"{found.architecture}-")


def _check_recipe(recipe: Recipe, name: str, found: Converted) -> None:
    if not _fits(recipe, name, found):
        raise ValueError(f"the checkpoint holds {_held(found)}, which is not what recipe {name!r} describes")
    if not recipe.paper:
        raise ValueError(f"recipe {name!r} is no row of the paper")


def _class_names() -> list[str]:
    """The class folders of ImageNet-1K in the order of the labels."""
    import_timm()
    from timm.data import ImageNetInfo

    return [str(name) for name in ImageNetInfo().label_names()]


def convert(state: Mapping[str, Tensor], classes: int = CLASSES) -> Converted:
    """Convert weights with mmpretrain's names to those of a timm model; a ValueError for an unknown network."""
    state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    prefix = next((each for each in CLASSIFIERS if f"{each}weight" in state), None)
    body = {
        name.removeprefix("backbone."): tensor
        for name, tensor in state.items()
        if name.startswith("backbone.") and not (prefix and name.startswith(prefix))
    }
    if prefix is None or not body:
        raise ValueError(f"the checkpoint does not have mmpretrain's names: it must hold one of {KNOWN}")
    if "stem.0.conv.weight" in body:
        weights, classifier, architecture = _resnet_d(body), "fc.", _depth_of_resnet(body)
    elif "features.0.conv.weight" in body:
        weights, classifier, architecture = _vgg(body), "head.fc.", "vgg13bn"
    elif "stages.0.blocks.0.norm1.weight" in body:
        weights, classifier, architecture = _swin(body), "head.fc.", "swin-t"
    elif "layers.0.ln1.weight" in body:
        weights, classifier, architecture = _deit3(body), "head.", "deit3-s"
    else:
        raise ValueError(f"the checkpoint holds another network than {KNOWN}: it has {next(iter(body))!r}")
    head, bias = state[f"{prefix}weight"], state.get(f"{prefix}bias")
    if bias is not None:
        return Converted(architecture, None, weights | {f"{classifier}weight": head, f"{classifier}bias": bias})
    if head.ndim != 2 or head.shape[0] % classes:
        raise ValueError(f"{prefix}weight must have {classes} times k rows, got shape {tuple(head.shape)}")
    k = head.shape[0] // classes
    return Converted(architecture, k, weights | {f"{classifier}weight": head.reshape(classes, k, head.shape[1])})


def _renamed(body: Mapping[str, Tensor], *patterns: tuple[str, str]) -> Tensors:
    """Rename tensors: replace each pattern in turn."""
    names = {name: name for name in body}
    for pattern, replacement in patterns:
        names = {name: re.sub(pattern, replacement, new) for name, new in names.items()}
    return {names[name]: tensor for name, tensor in body.items()}


def _resnet_d(body: Tensors) -> Tensors:
    # Without pooling, mmpretrain's indices start at 0; timm has an identity at that index.
    shifted = {
        re.sub(r"downsample\.(\d)", lambda found: f"downsample.{int(found[1]) + 1}", name)
        if f"{name.split('.downsample.')[0]}.downsample.0.weight" in body
        else name: tensor
        for name, tensor in body.items()
    }
    return _renamed(
        shifted,
        (r"^stem\.0\.conv\.", "conv1.0."),
        (r"^stem\.0\.bn\.", "conv1.1."),
        (r"^stem\.1\.conv\.", "conv1.3."),
        (r"^stem\.1\.bn\.", "conv1.4."),
        (r"^stem\.2\.conv\.", "conv1.6."),
        (r"^stem\.2\.bn\.", "bn1."),
    )


def _depth_of_resnet(body: Mapping[str, Tensor]) -> str:
    blocks = len({name.split(".")[1] for name in body if name.startswith("layer3.")})
    return {6: "resnet50d", 23: "resnet101d", 36: "resnet152d"}.get(
        blocks, f"a ResNet-D with {blocks} blocks in layer3"
    )


def _vgg(body: Tensors) -> Tensors:
    """Renumber: mmpretrain has one index for convolution, norm and activation together, timm one for each."""
    convolutions = {int(name.split(".")[1]) for name in body if name.startswith("features.")}
    place, places = 0, {}
    for number in range(max(convolutions) + 1):
        places[number] = place
        place += 3 if number in convolutions else 1
    weights = {}
    for name, tensor in body.items():
        parts = name.split(".")
        if parts[0] == "features":
            name = f"features.{places[int(parts[1])] + (parts[2] == 'bn')}.{parts[3]}"
        elif name.startswith("classifier.0."):
            name = f"pre_logits.fc1.{parts[2]}"
            tensor = tensor.reshape(len(tensor), -1, 7, 7) if parts[2] == "weight" else tensor
        elif name.startswith("classifier.3."):
            name = f"pre_logits.fc2.{parts[2]}"
            tensor = tensor[..., None, None] if parts[2] == "weight" else tensor
        weights[name] = tensor
    return weights


def _swin(body: Tensors) -> Tensors:
    kept = {name: each for name, each in body.items() if not name.endswith(("relative_position_index", "attn_mask"))}
    for name, tensor in kept.items():
        if ".downsample." in name:
            kept[name] = _merged_as_timm_does(tensor)
    last = max(int(name.split(".")[1]) for name in kept if name.startswith("stages."))
    downsamplings = [(rf"^stages\.{stage}\.downsample\.", f"layers.{stage + 1}.downsample.") for stage in range(last)]
    return _renamed(
        kept,
        (r"\.attn\.w_msa\.", ".attn."),
        (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
        (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
        *downsamplings,
        (r"^stages\.", "layers."),
        (rf"^norm{last}\.", "norm."),
        (r"^patch_embed\.projection\.", "patch_embed.proj."),
    )


def _merged_as_timm_does(tensor: Tensor) -> Tensor:
    """Reorder the last axis from nn.Unfold's (channel, row, column) to timm's (column, row, channel)."""
    patches = tensor.unflatten(-1, (-1, 2, 2))
    return patches.movedim((-1, -2, -3), (-3, -2, -1)).flatten(-3)


def _deit3(body: Tensors) -> Tensors:
    """Rename, and copy the first norm of each layer over an untrained second one.

    Since March 2023 mmpretrain applies the first norm twice and never the second. The second then keeps its initial
    values, scale exactly 1 and shift exactly 0.
    """
    seconds = {name: tensor for name, tensor in body.items() if re.match(r"layers\.\d+\.ln2\.", name)}
    if all(bool((tensor == float(name.endswith("weight"))).all()) for name, tensor in seconds.items()):
        body = {**body, **{name: body[name.replace(".ln2.", ".ln1.")] for name in seconds}}
    return _renamed(
        body,
        (r"\.attn\.gamma1\.weight$", ".ls1.gamma"),
        (r"\.ffn\.gamma2\.weight$", ".ls2.gamma"),
        (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
        (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
        (r"\.ln1\.", ".norm1."),
        (r"\.ln2\.", ".norm2."),
        (r"^ln1\.", "norm."),
        (r"^patch_embed\.projection\.", "patch_embed.proj."),
        (r"^layers\.", "blocks."),
    )
