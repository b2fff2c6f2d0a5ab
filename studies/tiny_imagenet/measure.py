"""What is measured of the weights of a run, right after it: class separation, transfer, and what its part asks for."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grassy import analysis, geometry
from grassy.heads import GrassmannHead, Head, heads_of
from grassy.inference.feature_models import FeatureModel, open_model
from grassy.precision import amp_dtype
from grassy.transfer.datasets import KNOWN
from studies.cifar100.measure import Labelled, features
from studies.tiny_imagenet import probes, users
from studies.tiny_imagenet.data import Store
from studies.tiny_imagenet.plan import (
    COARSE,
    FINAL,
    GENERALISE_FINAL,
    LINEAR_PROBES,
    OTHER_PROBES,
    Entry,
    recipe_of,
)

#: Sets whose classes are looked for by retrieval and few-shot learning, and sets that hold outliers.
UNSEEN, OUTLIERS = ("cifar100", "flowers", "pets"), ("flowers", "cifar10")


def measure(weights: Path, entry: Entry, store: Store) -> dict[str, Any]:
    """All measures of an entry. While settings are being chosen, transfer is that of cross-validation alone."""
    recipe = recipe_of(entry)
    source = open_model(str(weights), store.device)
    dtype = amp_dtype(recipe.amp, store.device)
    (head,) = heads_of(source.model)
    found: dict[str, Any] = {}
    own: dict[str, Labelled] = {}
    for part, both in store.training_arrays(entry).items():
        pixels, labels = store.on_device(*both)
        own[part] = x, _ = features(source, pixels, dtype), labels
        found[f"images_{part}"] = len(labels)
        found[f"variability_{part}"] = analysis.variability(x, labels)
        found[f"r2_{part}"] = analysis.class_separation(x, labels)
    if head.subspace_names:
        weight = head.get_parameter(head.subspace_names[0])
        found["orthonormality_error"] = float(geometry.orthonormality_error(weight.detach()))
    lab = Lab(source, store, dtype, with_test=not entry.judged_by_held_out)
    found |= lab.transfer(entry.sets)
    if entry.stage in (FINAL, GENERALISE_FINAL):
        found["users"] = lab.users(head, own)
    if entry.stage == COARSE:
        found["fine_classes"] = lab.fine_classes(head)
    return found


class Lab:
    """A trained network and the data sets that it is measured on. Test images are looked at only if asked for."""

    def __init__(self, source: FeatureModel, store: Store, dtype: torch.dtype | None, with_test: bool) -> None:
        self.source, self.store, self.dtype, self.with_test = source, store, dtype, with_test
        self._features: dict[tuple[str, str], Tensor] = {}

    def features(self, name: str, part: str) -> Labelled:
        """Features (B, N) and labels of a data set."""
        pixels, labels = self.store.tensors(name)[part]
        if (name, part) not in self._features:
            self._features[name, part] = features(self.source, pixels, self.dtype)
        return self._features[name, part], labels

    @torch.inference_mode()
    def transfer(self, sets: tuple[str, ...]) -> dict[str, Any]:
        """The probes of features on the other data sets."""
        found: dict[str, dict[str, probes.Probed]] = {}
        for name in sets:
            train, labels = self.features(name, "train")
            test = self.features(name, "test") if self.with_test else ()
            for probe in probes.names(self.with_test, LINEAR_PROBES, OTHER_PROBES):
                found.setdefault(probe, {})[name] = probes.probe(probe, train, labels, KNOWN[name][3], *test)
        return probes.table(found)

    def users(self, head: Head, own: dict[str, Labelled]) -> dict[str, Any]:
        """Retrieval, few-shot learning, outliers, calibration and pruning; `own`: what the network was trained for."""
        x, labels = own["test"]
        found: dict[str, Any] = {}
        for name in UNSEEN:
            found.setdefault("recall_at_1", {})[name] = users.recall_at_1(*self.features(name, "test"))
            for shots in (1, 5):
                score = users.few_shot(*self.features(name, "test"), shots)
                found.setdefault(f"{shots}_shot", {})[name] = score
        outliers = {name: self.features(name, "test")[0] for name in OUTLIERS}
        found["outliers"] = users.detection(head, x, outliers)
        found["calibration"] = users.calibration(head.scores(x), labels)
        if type(head) is GrassmannHead:
            found["pruning"] = users.pruning(head, *own["train"], x, labels)
        return found

    def fine_classes(self, head: Head) -> dict[str, Any]:
        """The fine classes of CIFAR-100, probed inside the subspace of the predicted superclass and outside of it."""
        (train, labels), (test, test_labels) = self.features("cifar100", "train"), self.features("cifar100", "test")
        parts = zip(("inside", "residual"), *(users.inside_and_residual(head, x) for x in (train, test)), strict=True)
        found = {
            part: {name: probes.probe(name, own, labels, "top1", own_test, test_labels).test for name in LINEAR_PROBES}
            for part, own, own_test in parts
        }
        return found
