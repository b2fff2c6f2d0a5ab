"""Weights that are sharded over processes, loaded for inference."""

import pytest
import torch
import torch.distributed as dist

from grassy.distributed.state import save_state
from grassy.inference.load import load, load_sharded
from grassy.models import create_model
from grassy.runs.weights import Description, description_text


@pytest.mark.parametrize(
    ("option", "message"),
    [("device", "a head must be described without device, got 'meta'"), ("turns", "has no option")],
)
def test_a_description_may_not_place_its_head_or_invent_options(option, message, tmp_path):
    head = {"name": "grassmann", "k": 2}
    model = create_model("test_resnet", 5, head, {})
    about = Description(model="test_resnet", num_classes=5, head={**head, option: "meta"}, img_size=32)
    save_state(tmp_path, model, plain={"description": description_text(about)})
    for read in (load, lambda save: load_sharded(save, torch.device("cpu"))):
        with pytest.raises(ValueError, match=message) as caught:
            read(tmp_path / "save-1")
        assert str(caught.value).startswith(str(tmp_path / "save-1"))


def saved_with(description, folder):
    model = create_model("test_resnet", 5, {"name": "grassmann", "k": 2}, {})
    return save_state(folder, model, plain={"description": description_text(description)})


def test_a_description_of_more_classes_than_there_are_weights_allocates_nothing(tmp_path):
    about = Description("test_resnet", 10**7, {"name": "grassmann", "k": 8}, img_size=32)
    with pytest.raises(ValueError, match="does not hold the weights that it describes: a head of 80000000 rows"):
        load_sharded(saved_with(about, tmp_path), torch.device("cpu"))


@pytest.mark.distributed
def test_a_description_with_other_logits_than_the_weights_is_refused_in_shards_too(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        about = Description("test_resnet", 5, {"name": "grassmann", "k": 2, "gamma": 7.0}, img_size=32)
        with pytest.raises(ValueError, match="belongs to a head with different options: gamma"):
            load_sharded(saved_with(about, tmp_path), torch.device("cpu"))
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
def test_a_save_that_lacks_a_tensor_of_its_model_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("grassy.distributed.state.model_tensors", without_options)
    about = Description("test_resnet", 5, {"name": "grassmann", "k": 2}, img_size=32)
    save = saved_with(about, tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"has no model\.fc\._extra_state: does it belong to another model"):
            load_sharded(save, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def without_options(kind, model):
    found = {} if model is None else {f"{kind}.{name}": tensor for name, tensor in model.state_dict().items()}
    found.pop(f"{kind}.fc._extra_state", None)
    return found
