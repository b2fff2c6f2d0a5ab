"""What is measured of the weights of a run, right after it: class separation, transfer, and what its part asks for."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grassy import analysis, geometry
from grassy.heads import heads_of
from grassy.inference.feature_models import FeatureModel, open_model
from grassy.precision import amp_dtype
from grassy.transfer.datasets import KNOWN
from studies.cifar100.measure import features
from studies.tiny_imagenet import probes
from studies.tiny_imagenet.data import Store
from studies.tiny_imagenet.plan import LINEAR_PROBES, OTHER_PROBES, SETS, Entry, recipe_of


def measure(weights: Path, entry: Entry, store: Store) -> dict[str, Any]:
    """All measures of an entry. While settings are being chosen, transfer is that of cross-validation alone."""
    recipe = recipe_of(entry)
    source = open_model(str(weights), store.device)
    dtype = amp_dtype(recipe.amp, store.device)
    found: dict[str, Any] = {}
    for part, both in store.training_arrays(entry).items():
        pixels, labels = store.on_device(*both)
        x = features(source, pixels, dtype)
        found[f"variability_{part}"] = analysis.variability(x, labels)
        found[f"r2_{part}"] = analysis.class_separation(x, labels)
    (head,) = heads_of(source.model)
    if head.subspace_names:
        weight = head.get_parameter(head.subspace_names[0])
        found["orthonormality_error"] = float(geometry.orthonormality_error(weight.detach()))
    return found | transfer(source, SETS[entry.data], store, dtype, with_test=not entry.judged_by_held_out)


@torch.inference_mode()
def transfer(
    source: FeatureModel, sets: tuple[str, ...], store: Store, dtype: torch.dtype | None, with_test: bool
) -> dict[str, Any]:
    """The probes of features on the other data sets; test images are looked at only if asked for."""
    found: dict[str, dict[str, probes.Probed]] = {}
    for name in sets:
        images = store.tensors(name)
        train, labels = features(source, images["train"][0], dtype), images["train"][1]
        test: tuple[Tensor, Tensor] | tuple[()] = ()
        if with_test:
            test = features(source, images["test"][0], dtype), images["test"][1]
        for probe in probes.names(with_test, LINEAR_PROBES, OTHER_PROBES):
            found.setdefault(probe, {})[name] = probes.probe(probe, train, labels, KNOWN[name][3], *test)
    return probes.table(found)
