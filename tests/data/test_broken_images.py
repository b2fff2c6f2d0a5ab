"""Images that cannot be read, and labels beyond the head, while a run reads them."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from grassy.data.batch import Batch, Failure, checked
from grassy.data.batch_transforms import Preparation
from grassy.data.order import Share
from grassy.data.run_data import open_data
from grassy.data.transforms import eval_transform
from grassy.data.worker_loader import ValidationLoader
from grassy.distributed.processes import Process
from grassy.inference.evaluate import evaluate
from training_cases import tiny_folders, tiny_recipe

CPU = Process(torch.device("cpu"))


def test_a_broken_image_gives_way_to_another_in_training_and_does_not_count_in_validation(tmp_path):
    folder = tiny_folders(tmp_path)
    whole = io.BytesIO()
    Image.new("RGB", (12, 12)).save(whole, "png")
    (folder / "train" / "cat" / "0.png").write_bytes(whole.getvalue()[:50])
    (folder / "val" / "dog" / "1.png").write_bytes(b"not an image")
    data = open_data(tiny_recipe(batch_size=18), folder, CPU)
    ((batch,),) = data.train.epoch(0)
    assert [failure.name for failure in batch.failures] == [str(folder / "train" / "cat" / "0.png")]
    assert len(batch.images) == 18
    assert set(batch.indices) == set(range(1, 18))
    (batch,) = data.validation
    assert batch.failures == [Failure(str(folder / "val" / "dog" / "1.png"), "not an image that Pillow knows")]
    assert batch.labels.tolist().count(-1) == 1


def test_images_in_place_of_broken_ones_are_drawn_from_the_whole_set_and_are_the_same_in_every_run(tmp_path):
    folder = tiny_folders(tmp_path, classes=("cat", "dog"), images=60)
    for number in range(40):  # twice as many side by side as end a run
        (folder / "train" / "cat" / f"{number}.png").write_bytes(b"")
    first, second, third = (
        [parts[0].indices for parts in open_data(tiny_recipe(batch_size=120, seed=seed), folder, CPU).train.epoch(0)]
        for seed in (0, 0, 1)
    )
    assert first == second != third
    counts = np.bincount(first[0], minlength=120)
    assert counts[:40].max() == 0
    assert counts[40:].min() == 1  # each readable image has its own turn
    assert counts.max() <= 6
    assert np.count_nonzero(counts > 1) > 20


def test_a_set_of_nothing_but_broken_images_is_an_error(tmp_path):
    folder = tiny_folders(tmp_path, classes=("cat",), images=25)
    for file in (folder / "train" / "cat").iterdir():
        file.write_bytes(b"")
    data = open_data(tiny_recipe(), folder, CPU)
    with pytest.raises(ValueError, match="20 images in a row cannot be read"):
        next(data.train.epoch(0))


def test_a_validation_batch_without_a_readable_image_is_passed_over(tmp_path):
    folder = tiny_folders(tmp_path)
    for file in (folder / "val" / "cat").iterdir():
        file.write_bytes(b"")
    recipe = tiny_recipe(val_batch_size=3)
    data = open_data(recipe, folder, CPU)
    prepare = Preparation(recipe.mean, recipe.std, CPU.device)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 3))  # needs its 8x8 pixels
    metrics, failures = evaluate(model, data.validation, prepare, CPU.device)
    assert (metrics.images, len(failures)) == (6, 3)
    for file in (folder / "val").glob("*/*.png"):
        file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"none of the images could be read, .*png first: not an image that Pillow"):
        evaluate(model, data.validation, prepare, CPU.device)


class Unlabelled:
    """Images whose labels are known only when they are read, as those of Hugging Face's data sets."""

    class_names = None

    def __init__(self, labels):
        self.all = labels

    def __len__(self):
        return len(self.all)

    def load(self, index):
        return np.zeros((8, 8, 3), np.uint8), self.all[index]

    def name(self, index):
        return f"image {index}"

    def labels(self):
        return None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_label_beyond_the_head_is_named_when_it_is_first_seen(workers):
    transform = eval_transform(8, 1.0, "bilinear")
    loader = ValidationLoader(Unlabelled([0, 2, 3]), transform, 3, Share(), workers, CPU.device, num_classes=3)
    with pytest.raises(ValueError, match=r"^image 2 has label 3, but the head has 3 classes \(0 to 2\)$"):
        next(iter(loader))
    loader = ValidationLoader(Unlabelled([0, -1, 2]), transform, 3, Share(), workers, CPU.device, num_classes=3)
    (batch,) = loader
    assert batch.labels.tolist() == [0, -1, 2]
    assert batch.failures == [Failure("image 1", "its label is -1")]


def test_a_label_of_a_stream_is_checked_without_a_name():
    def batch(*labels):
        return Batch(torch.zeros(2, 3, 8, 8), torch.tensor(labels))

    assert len(list(checked([batch(0, 1), batch(2, 0)], 3))) == 2
    for label in (3, -1):
        with pytest.raises(ValueError, match=f"an image has label {label}, but the head has 3 classes"):
            list(checked([batch(0, label)], 3))
