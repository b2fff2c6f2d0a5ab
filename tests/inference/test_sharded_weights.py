"""Weights that are sharded over processes, loaded for inference."""

import pytest
import torch

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
