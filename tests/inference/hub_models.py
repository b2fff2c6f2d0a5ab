"""Small models of timm and transformers with heads, for the tests of folders of the hub."""

from pathlib import Path

import pytest
import torch
import transformers as T
from torch import nn

import grassy
from grassy.models import import_timm

timm = import_timm()
T.utils.logging.set_verbosity_error()
T.utils.logging.disable_progress_bar()

C = 5
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "num_labels": C}
STAGES = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": C}
VIT = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2}
HEADS = {
    "unequal": {"name": "grassmann", "k": [1, 2, 3, 2, 1]},
    "standardised": {"name": "grassmann", "k": 2, "standardize": True, "gamma": "auto"},
    "learnable": {"name": "grassmann", "k": 2, "learnable_gamma": True, "gamma": 7.0},
    "unnormalised": {"name": "grassmann", "k": 2, "normalize": False, "gamma": 0.9},
    "cosine": {"name": "cosine", "scale": 9.0},
    "linear": {"name": "linear"},
}
TRANSFORMERS = {
    "vit": lambda: T.ViTForImageClassification(T.ViTConfig(**SMALL, image_size=32, patch_size=8)),
    "convnext": lambda: T.ConvNextForImageClassification(T.ConvNextConfig(**STAGES)),
    "resnet": lambda: T.ResNetForImageClassification(T.ResNetConfig(**STAGES, embedding_size=8, layer_type="basic")),
    "bert": lambda: T.BertForSequenceClassification(T.BertConfig(**SMALL, vocab_size=50)),
    "roberta": lambda: T.RobertaForSequenceClassification(T.RobertaConfig(**SMALL, vocab_size=50)),
    "gpt2": lambda: T.GPT2ForSequenceClassification(
        T.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, num_labels=C, pad_token_id=0, eos_token_id=0)
    ),
}
TEXT = ("bert", "roberta", "gpt2")


def trained(model: nn.Module, head: dict, inputs: dict | None = None) -> nn.Module:
    """A model with a head, after two steps, so that statistics and a learned gamma are not what they were."""
    torch.manual_seed(0)
    grassy.replace_head(model, **head)
    optimizer = grassy.make_optimizer(model.train(), "sgd", lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        labels = torch.randint(0, C, (4,))
        if inputs is None:
            grassy.classification_loss(model, torch.randn(4, 3, 32, 32), labels).backward()
        else:
            model(**{name: value.repeat(2, *[1] * (value.ndim - 1)) for name, value in inputs.items()}, labels=labels)[
                "loss"
            ].backward()
        optimizer.step()
    return model.eval()


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name in TEXT:
        return {"input_ids": torch.randint(1, 50, (2, 6), generator=generator)}
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}


def of_transformers(name: str, head: str = "unequal") -> nn.Module:
    torch.manual_seed(0)
    return trained(TRANSFORMERS[name](), HEADS[head], inputs_of(name))


def of_timm(architecture: str, head: str = "unequal", **options) -> nn.Module:
    torch.manual_seed(0)
    return trained(timm.create_model(architecture, num_classes=C, **options), HEADS[head])


@torch.no_grad()
def logits(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**inputs).logits


RUN = Path(__file__).parents[1] / "fixtures" / "runs" / "grassmann"


def with_adapters(base: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, init_lora_weights=False, target_modules=["query", "value"])
    model = peft.get_peft_model(base, config)
    optimizer = grassy.make_optimizer(model, "adamw", lr=1e-2, head_lr=0.1)
    model(**inputs_of("bert"), labels=torch.tensor([0, 1])).loss.backward()
    optimizer.step()
    return model.eval()
