"""Text models with class subspaces, with and without LoRA."""

import pytest
import torch
import transformers as T
from torch import nn

import grassy
from grassy.heads import heads_of

from .hub_models import SMALL, logits


def rows_of_text(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts of six words; which of three marker words a text holds is its class."""
    words = torch.randint(10, 50, (number, 6))
    labels = torch.randint(0, 3, (number,))
    words[torch.arange(number), torch.randint(0, 6, (number,))] = 1 + labels
    return words, labels


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_text_is_classified_by_subspaces_with_and_without_lora(lora, tmp_path):
    torch.manual_seed(0)
    sizes = {**SMALL, "hidden_size": 32, "intermediate_size": 64, "num_labels": 3}
    model = T.BertForSequenceClassification(T.BertConfig(**sizes, vocab_size=50, hidden_dropout_prob=0.0))
    if lora:  # adapters are for a model that knows something: here one that was trained on another order of the classes
        fit(model, 80, lambda labels: (labels + 1) % 3)
    grassy.replace_head(model, "grassmann", k=2, gamma="auto")
    if lora:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules="all-linear"))
        frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
        assert any("word_embeddings" in name for name in frozen)
    fit(model, 80)
    words, labels = rows_of_text(200)
    accuracy = (logits(model.eval(), {"input_ids": words}).argmax(-1) == labels).float().mean()
    assert accuracy > 0.9
    if lora:
        assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
        model = model.merge_and_unload()
    grassy.save(model, tmp_path / "saved", ["a", "b", "c"])
    assert torch.equal(
        logits(grassy.load(tmp_path / "saved"), {"input_ids": words}), logits(model, {"input_ids": words})
    )


def fit(model: nn.Module, steps: int, relabel=lambda labels: labels) -> None:
    head = {"head_lr": 0.1} if heads_of(model) else {}
    optimizer = grassy.make_optimizer(model.train(), "adamw", lr=5e-3, **head)
    for _ in range(steps):
        words, labels = rows_of_text(32)
        optimizer.zero_grad()
        model(input_ids=words, labels=relabel(labels)).loss.backward()
        optimizer.step()
