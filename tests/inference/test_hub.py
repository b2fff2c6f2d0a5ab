"""Folders of the hub: the same logits come back, and timm and transformers read the rest without grassy."""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as T
from safetensors.torch import load_file, save_file
from torch import nn

import grassy
from grassy.heads import describe, heads_of
from grassy.inference.export import export
from grassy.inference.predict import predict
from grassy.inference.save import publish
from grassy.inference.validate import validate
from grassy.models import import_timm
from grassy.report.analyze import analyze
from grassy.runs.hub import CARD, CONFIG, HEAD, WEIGHTS
from grassy.runs.weights import read_description, read_weights, save_weights
from training_cases import tiny_arrays, tiny_folders

timm = import_timm()
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


@pytest.fixture(autouse=True)
def _quiet():
    T.utils.logging.set_verbosity_error()
    T.utils.logging.disable_progress_bar()


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


# ---------------------------------------------------------------------- there and back

CASES = [(name, head) for name in ("vit", "bert") for head in HEADS]
CASES += [("convnext", "standardised"), ("resnet", "learnable"), ("roberta", "standardised"), ("gpt2", "unequal")]


@pytest.mark.parametrize(("name", "head"), CASES)
def test_a_model_of_transformers_comes_back_with_the_same_logits(name, head, tmp_path):
    model, inputs = of_transformers(name, head), inputs_of(name)
    before = logits(model, inputs)
    grassy.save(model, tmp_path / "saved", [f"class {number}" for number in range(C)])
    again = grassy.load(tmp_path / "saved")
    assert type(again) is type(model)
    assert torch.equal(logits(again, inputs), before)
    assert [describe(each) for each in heads_of(again)] == [describe(each) for each in heads_of(model)]
    assert again.config.id2label[3] == "class 3"
    assert sorted(file.name for file in (tmp_path / "saved").iterdir()) == [CARD, CONFIG, WEIGHTS]
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]  # nothing is left behind
    again.save_pretrained(tmp_path / "own")  # the library's own way needs nothing of grassy's
    assert torch.equal(logits(grassy.load(tmp_path / "own"), inputs), before)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("architecture", "options"), [("test_resnet", {}), ("vit_tiny_patch16_224", VIT)])
def test_a_timm_model_comes_back_with_the_same_logits(architecture, options, head, tmp_path):
    model, names = of_timm(architecture, head, **options), [f"class {number}" for number in range(C)]
    x = torch.randn(2, 3, 32, 32)
    grassy.save(model, tmp_path / "saved", names, img_size=32, model_kwargs=options, crop_pct=0.8)
    file = tmp_path / "saved" / WEIGHTS
    whole = read_description(file)
    save_file(load_file(file), file)  # as others write it: without grassy's metadata, the config alone describes it
    about = read_description(file)
    assert (about.head, about.class_names, about.img_size, about.crop_pct) == (whole.head, names, 32, 0.8)
    assert (about.mean, about.std, about.interpolation) == (whole.mean, whole.std, whole.interpolation)
    again = grassy.load(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
    assert again.pretrained_cfg["label_names"] == names


def test_a_classifier_that_was_named_is_found_again(tmp_path):
    model = TRANSFORMERS["roberta"]()
    grassy.replace_head(model, "grassmann", classifier="classifier.out_proj", k=2)
    assert model.config.grassy_head["classifier"] == "classifier.out_proj"
    grassy.save(model.eval(), tmp_path)
    assert torch.equal(logits(grassy.load(tmp_path), inputs_of("roberta")), logits(model, inputs_of("roberta")))


def test_checkpoints_of_the_trainer_are_loaded(tmp_path):
    model = TRANSFORMERS["bert"]()
    grassy.replace_head(model, "grassmann", k=2, gamma="auto")
    rows = [{"input_ids": torch.randint(1, 50, (6,)), "labels": number % C} for number in range(10)]
    arguments = T.TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=2, per_device_train_batch_size=5, report_to=[], disable_tqdm=True
    )
    optimizer = grassy.make_optimizer(model, "adamw", lr=1e-3, head_lr=0.1)
    T.Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None)).train()
    again = grassy.load(tmp_path / "checkpoint-2")
    assert torch.equal(logits(again, inputs_of("bert")), logits(model.eval(), inputs_of("bert")))


# ---------------------------------------------------------------------- adapters


def with_adapters(base: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, init_lora_weights=False, target_modules=["query", "value"])
    model = peft.get_peft_model(base, config)
    optimizer = grassy.make_optimizer(model, "adamw", lr=1e-2, head_lr=0.1)
    model(**inputs_of("bert"), labels=torch.tensor([0, 1])).loss.backward()
    optimizer.step()
    return model.eval()


def test_adapters_of_peft_come_back_by_peft_and_by_grassy_and_merged(tmp_path):
    peft = pytest.importorskip("peft")
    grassy.save(of_transformers("bert", "standardised"), tmp_path / "base")
    base = grassy.load(tmp_path / "base")
    start = logits(base, inputs_of("bert"))
    model = with_adapters(base)
    expected = logits(model, inputs_of("bert"))
    assert not torch.allclose(expected, start)
    model.save_pretrained(tmp_path / "adapters")
    by_peft = peft.PeftModel.from_pretrained(grassy.load(tmp_path / "base"), tmp_path / "adapters").eval()
    assert torch.equal(logits(by_peft, inputs_of("bert")), expected)
    assert torch.equal(logits(grassy.load(tmp_path / "adapters"), inputs_of("bert")), expected)
    with pytest.raises(ValueError, match=r"has adapters of PEFT: save model\.merge_and_unload"):
        grassy.save(model, tmp_path / "merged")
    merged = model.merge_and_unload()
    grassy.save(merged, tmp_path / "merged")
    assert torch.equal(logits(grassy.load(tmp_path / "merged"), inputs_of("bert")), logits(merged, inputs_of("bert")))
    torch.testing.assert_close(logits(merged, inputs_of("bert")), expected, rtol=1e-4, atol=1e-4)


def test_adapters_for_a_model_that_describes_no_head_are_refused(tmp_path):
    TRANSFORMERS["bert"]().save_pretrained(tmp_path / "plain")
    model = T.BertForSequenceClassification.from_pretrained(tmp_path / "plain")
    grassy.replace_head(model, "grassmann", k=2)
    with_adapters(model).save_pretrained(tmp_path / "adapters")
    with pytest.raises(ValueError, match="describes no head: replace the head of that model"):
        grassy.load(tmp_path / "adapters")


# ---------------------------------------------------------------------- text


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


# ---------------------------------------------------------------------- without grassy

ALONE = """
import runpy, sys

class Missing:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "grassy":
            raise ModuleNotFoundError("no grassy here")

sys.meta_path.insert(0, Missing())
torchvision_import, folder = sys.argv[1:]
runpy.run_path(torchvision_import)["import_torchvision"]()  # beside a CPU build of torch, timm needs it
import timm, torch, transformers
from safetensors.torch import load_file

try:
    import grassy
    raise SystemExit("grassy could be imported")
except ModuleNotFoundError:
    pass
torch.set_num_threads(1)  # as in the tests: sums in another order have other bits
expected = load_file(f"{folder}/expected.safetensors")
with torch.no_grad():
    for name in ("test_resnet", "vit_tiny_patch16_224"):
        model = timm.create_model(f"local-dir:{folder}/{name}", pretrained=True, num_classes=0).eval()
        assert torch.equal(model.forward_features(expected["pixel_values"]), expected[f"{name}.map"]), name
        assert torch.equal(model(expected["pixel_values"]), expected[f"{name}.features"]), name
        assert list(timm.data.resolve_model_data_config(model)["input_size"]) == [3, 32, 32]
        try:
            timm.create_model(f"local-dir:{folder}/{name}", pretrained=True)
            raise SystemExit(f"timm read the classifier of {name} without a word")
        except RuntimeError as error:
            assert "size mismatch" in str(error) or "nexpected key" in str(error), error
    for name in ("vit", "convnext", "bert"):
        model = transformers.AutoModel.from_pretrained(f"{folder}/{name}").eval()
        inputs = {"input_ids": expected["input_ids"]} if name == "bert" else {"pixel_values": expected["pixel_values"]}
        assert torch.equal(model(**inputs).last_hidden_state, expected[f"{name}.features"]), name
        auto = "AutoModelForSequenceClassification" if name == "bert" else "AutoModelForImageClassification"
        try:
            getattr(transformers, auto).from_pretrained(f"{folder}/{name}")
            raise SystemExit(f"transformers read the classifier of {name} without a word")
        except RuntimeError as error:
            assert "mismatch" in str(error), error
print("read")
"""


@pytest.mark.slow
def test_timm_and_transformers_read_all_but_the_classifier_without_grassy(tmp_path):
    expected = {**inputs_of("vit"), **inputs_of("bert")}
    for name, options in (("test_resnet", {}), ("vit_tiny_patch16_224", VIT)):
        model = of_timm(name, "standardised", **options)
        grassy.save(model, tmp_path / name, img_size=32, model_kwargs=options)
        with torch.no_grad():
            features = model.forward_features(expected["pixel_values"])
            expected |= {f"{name}.map": features, f"{name}.features": model.forward_head(features, pre_logits=True)}
    for name in ("vit", "convnext", "bert"):
        model = of_transformers(name)
        grassy.save(model, tmp_path / name)
        with torch.no_grad():
            expected[f"{name}.features"] = model.base_model(**inputs_of(name)).last_hidden_state
    save_file({name: tensor.contiguous() for name, tensor in expected.items()}, tmp_path / "expected.safetensors")
    patch = Path(grassy.__file__).parent / "torchvision_import.py"
    done = subprocess.run([sys.executable, "-c", ALONE, patch, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("read")


# ---------------------------------------------------------------------- pipelines and the hub


def test_a_pipeline_takes_an_image_model(tmp_path):
    from PIL import Image

    model = of_transformers("vit")
    processor = T.ViTImageProcessor(size={"height": 32, "width": 32})
    grassy.save(model, tmp_path, ["ant", "bee", "cat", "dog", "eel"])
    processor.save_pretrained(tmp_path)
    pipeline = T.pipeline(
        "image-classification",
        model=grassy.load(tmp_path),
        image_processor=T.AutoImageProcessor.from_pretrained(tmp_path),
        device="cpu",
    )
    image = Image.new("RGB", (40, 40), (200, 30, 90))
    found = {row["label"]: row["score"] for row in pipeline(image, top_k=C)}
    expected = logits(model, processor(image, return_tensors="pt")).softmax(-1)[0]
    for label, probability in zip(["ant", "bee", "cat", "dog", "eel"], expected.tolist(), strict=True):
        assert found[label] == pytest.approx(probability, abs=1e-6)


def test_a_pipeline_takes_a_text_model(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[PAD]": 0, "[UNK]": 1, **{f"w{number}": number for number in range(2, 50)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = T.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")
    model = of_transformers("bert")
    grassy.save(model, tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pipeline = T.pipeline(
        "text-classification",
        model=grassy.load(tmp_path),
        tokenizer=T.AutoTokenizer.from_pretrained(tmp_path),
        device="cpu",
    )
    found = {row["label"]: row["score"] for row in pipeline("w3 w7 w40", top_k=C)}
    expected = logits(model, tokenizer("w3 w7 w40", return_tensors="pt")).softmax(-1)[0]
    for number, probability in enumerate(expected.tolist()):
        assert found[f"LABEL_{number}"] == pytest.approx(probability, abs=1e-6)


def in_a_cache(folder: Path, cache: Path, repository: str) -> None:
    """Lay a folder out as huggingface_hub keeps what it has fetched."""
    place = cache / f"models--{repository.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(commit)
    shutil.copytree(folder, place / "snapshots" / commit)


def test_a_repository_of_the_hub_is_loaded_from_the_cache(tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    model, text, x = of_timm("test_resnet"), of_transformers("bert"), torch.randn(2, 3, 32, 32)
    grassy.save(model, tmp_path / "image", ["a", "b", "c", "d", "e"])
    grassy.save(text, tmp_path / "text")
    for kind in ("image", "text"):
        in_a_cache(tmp_path / kind, tmp_path / "cache", f"me/{kind}")
    with torch.no_grad():
        assert torch.equal(grassy.load("hf-hub:me/image")(x), model(x))
        assert torch.equal(grassy.load("hf-hub:me/image@main")(x), model(x))
    assert torch.equal(logits(grassy.load("hf-hub:me/text"), inputs_of("bert")), logits(text, inputs_of("bert")))
    assert export("hf-hub:me/image", tmp_path / "model.pt2").is_file()  # so do the commands
    for wrong in ("hf-hub:me/nothing", "hf-hub:me/image@other", "hf-hub:no:name", "hf-hub:"):
        with pytest.raises(ValueError, match=f"{wrong} cannot be had from the hub"):
            grassy.load(wrong)


def test_only_files_that_hold_no_code_are_fetched(tmp_path, monkeypatch):
    import huggingface_hub

    asked = {}

    def download(repository, **options):
        asked.update(options, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    grassy.save(of_timm("test_resnet"), tmp_path)
    grassy.load("hf-hub:me/name@v1")
    assert (asked["repository"], asked["revision"]) == ("me/name", "v1")
    assert not any(pattern.endswith((".py", ".bin", ".pt", ".pkl", "*")) for pattern in asked["allow_patterns"])


# ---------------------------------------------------------------------- commands, and the card

RUN = Path(__file__).parents[1] / "fixtures" / "runs" / "grassmann"


def test_commands_open_a_folder_that_was_published_from_a_run(tmp_path):
    data = tiny_arrays(tmp_path / "data")
    publish(RUN, tmp_path / "hub")
    expected = validate(RUN, data)
    assert validate(tmp_path / "hub", data) == expected
    assert analyze(tmp_path / "hub", data)["data"]["images"] == 20
    images = tiny_folders(tmp_path / "images") / "val"
    found, same = (list(predict(each, [images], topk=2)) for each in (tmp_path / "hub", RUN))
    assert [each.probabilities for each in found] == [each.probabilities for each in same]
    card = (tmp_path / "hub" / CARD).read_text()
    about = read_description(RUN / "model_best.safetensors")
    for name in ("eval_top1", "eval_loss", "train_loss"):
        assert f"| {name.replace('_', ' ')} | {about.metrics[name]:.4g} |" in card
    assert "| lr |" not in card
    assert f"after epoch {about.epoch + 1}" in card  # as training printed it
    assert f"- epochs: `{about.recipe['epochs']}`" in card
    assert "- hflip" not in card  # which is the default
    assert "library_name: timm" in card


def test_export_writes_a_folder_for_the_hub(tmp_path):
    assert export(RUN, tmp_path / "hub") == tmp_path / "hub"
    assert (tmp_path / "hub" / CONFIG).is_file()
    assert torch.equal(grassy.load(tmp_path / "hub").head.weight, grassy.load(RUN).head.weight)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"full holds other files: name an \.onnx or \.pt2 file, or a new folder"):
        export(RUN, tmp_path / "full")


def test_a_card_that_was_written_by_hand_stays_and_a_new_one_tells_the_metrics(tmp_path):
    model = of_timm("test_resnet")
    grassy.save(model, tmp_path / "new", epoch=7, metrics={"eval_top1": 81.25})
    assert "after epoch 7" in (card := (tmp_path / "new" / CARD).read_text())
    assert "| eval top1 | 81.25 |" in card
    assert "subspace of 1 to 3 dimensions" in card
    (tmp_path / "new" / CARD).write_text("mine")
    grassy.save(model, tmp_path / "new")
    assert (tmp_path / "new" / CARD).read_text() == "mine"


def test_paths_of_the_machine_are_not_published(tmp_path):
    about = read_description(RUN / "model_best.safetensors")
    secret = {"initial_checkpoint": "/home/me/secret.safetensors", "dataset": "hfds//home/me/secret"}
    run = dataclasses.replace(about, recipe={**about.recipe, **secret}, metrics={"eval_top1": 1.0, "input_share": 0.25})
    save_weights(read_weights(RUN), run, tmp_path / "run.safetensors")
    publish(tmp_path / "run.safetensors", tmp_path / "hub")
    for file in (tmp_path / "hub").iterdir():
        assert b"secret" not in file.read_bytes(), file
    assert "input share" not in (tmp_path / "hub" / CARD).read_text()
    published = read_description(tmp_path / "hub" / WEIGHTS).recipe
    assert published["initial_checkpoint"]  # a run that began with other weights does not look like one that did not
    same = dataclasses.replace(run, recipe={**about.recipe, "initial_checkpoint": "hf-hub:me/public"})
    save_weights(read_weights(RUN), same, tmp_path / "run.safetensors")
    publish(tmp_path / "run.safetensors", tmp_path / "hub")
    assert read_description(tmp_path / "hub" / WEIGHTS).recipe["initial_checkpoint"] == "hf-hub:me/public"


@pytest.mark.parametrize("change", [{"head": {"gamma": "auto"}}, {"model": "test_resnet.r160_in1k"}])
def test_a_published_folder_agrees_with_itself(change, tmp_path):
    grassy.save(of_timm("test_resnet", "standardised"), tmp_path / "saved.safetensors")
    about = read_description(tmp_path / "saved.safetensors")
    changed = {"model": about.model, **change, "head": {**about.head, **change.get("head", {})}}
    weights = read_weights(tmp_path / "saved.safetensors")
    save_weights(weights, dataclasses.replace(about, **changed), tmp_path / "run.safetensors")
    publish(tmp_path / "run.safetensors", tmp_path / "hub")
    assert torch.equal(grassy.load(tmp_path / "hub").fc.weight, weights["fc.weight"])


# ---------------------------------------------------------------------- over what is there already


def in_parts(model: nn.Module) -> nn.Module:
    model.save_pretrained = functools.partial(model.save_pretrained, max_shard_size="8KB")
    return model


@pytest.mark.parametrize("order", ["whole, parts", "parts, whole", "parts, timm", "timm, parts"])
def test_a_second_save_leaves_nothing_of_the_first_to_load(order, tmp_path):
    for kind in order.split(", "):
        model = of_timm("test_resnet") if kind == "timm" else of_transformers("bert", "cosine")
        with torch.no_grad():
            next(model.parameters()).normal_()
        grassy.save(in_parts(model) if kind == "parts" else model, tmp_path / "saved")
        again = grassy.load(tmp_path / "saved").state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
        files = [file.name for file in (tmp_path / "saved").iterdir()]
        assert (WEIGHTS in files) == (kind != "parts")
        assert any(name.startswith("model-00001") for name in files) == (kind == "parts")
        assert ("model.safetensors.index.json" in files) == (kind == "parts")


@pytest.mark.parametrize("kind", ["timm", "transformers"])
def test_nothing_is_written_over_a_run_or_over_files_of_others(kind, tmp_path):
    model = of_timm("test_resnet") if kind == "timm" else of_transformers("bert")
    shutil.copytree(RUN, tmp_path / "run")
    TRANSFORMERS["bert"]().save_pretrained(tmp_path / "foreign")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").touch()
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for folder, said in (
        ("run", r"run is the folder of a run, with model_best\.safetensors: name another folder"),
        ("foreign", r"foreign holds other files: name a new folder, or one that grassy\.save wrote"),
        ("notes", "notes holds other files"),
    ):
        with pytest.raises(ValueError, match=said):
            grassy.save(model, tmp_path / folder)
        with pytest.raises(ValueError, match=said):
            publish(RUN, tmp_path / folder)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_a_folder_that_holds_all_but_a_model_gets_one(tmp_path):
    for name in (".gitattributes", CARD, "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text("{}")
    grassy.save(of_transformers("bert"), tmp_path)
    assert heads_of(grassy.load(tmp_path))


def test_a_model_that_its_library_does_not_give_back_is_not_saved(tmp_path):
    model = of_transformers("bert")
    own = model.save_pretrained

    def rounded(folder):
        own(
            folder, state_dict={name: tensor.bfloat16().to(tensor.dtype) for name, tensor in model.state_dict().items()}
        )

    model.save_pretrained = rounded
    with pytest.raises(
        ValueError, match=r"BertForSequenceClassification cannot be read again as it is saved: .* differs"
    ):
        grassy.save(model, tmp_path / "saved")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------- what is refused


def test_loading_checks_that_the_weights_are_on_the_manifold(tmp_path):
    for name, model in (("timm", of_timm("test_resnet")), ("text", of_transformers("bert"))):
        grassy.save(model, tmp_path / name)
        file, metadata = tmp_path / name / WEIGHTS, {"format": "pt"}
        tensors = load_file(file)
        (key,) = [key for key in tensors if key.endswith(("fc.weight", "classifier.weight"))]
        good = tensors[key]
        save_file({**tensors, key: good * 1.01}, file, metadata)
        with pytest.warns(UserWarning, match="re-orthonormalised"):
            grassy.load(tmp_path / name)
        save_file({**tensors, key: good * 2}, file, metadata)
        with pytest.raises(ValueError, match="not a weight of subspaces"):
            grassy.load(tmp_path / name)


def test_a_config_that_contradicts_the_weights_is_refused(tmp_path):
    grassy.save(of_transformers("bert"), tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    for change, said in (
        ({"gamma": 12.0}, r"gamma is 25\.0 there and 12\.0 here"),
        ({"k": 2}, r"does not hold the weights that it describes: look at classifier\.weight"),
        ({"name": "grasman"}, "unknown head 'grasman', did you mean 'grassmann'"),
        ({"gama": 1.0}, "has no option 'gama'"),
        ({"name": 3}, r"head\.name must be a string"),
        ({"model": 1}, "has no option 'model'"),
        ({"num_classes": 7}, "has no option 'num_classes'"),
        ({"device": "meta"}, "a head must be described without device, got 'meta'"),
        ({"classifier": "nowhere"}, "classifier='nowhere' is not a module"),
    ):
        (tmp_path / CONFIG).write_text(json.dumps({**config, HEAD: {**config[HEAD], **change}}))
        with pytest.raises(ValueError, match=said) as caught:
            grassy.load(tmp_path)
        assert "\n" not in str(caught.value)
    (tmp_path / CONFIG).write_text(json.dumps({**config, "architectures": ["os"]}))
    with pytest.raises(ValueError, match="transformers has no model 'os'"):
        grassy.load(tmp_path)
    for names in (["BertModel", "BertForSequenceClassification"], "BertForSequenceClassification", [5], [], None):
        (tmp_path / CONFIG).write_text(json.dumps({**config, "architectures": names}))
        with pytest.raises(ValueError, match=r"config\.json: architectures must be a list of one name, got "):
            grassy.load(tmp_path)
    for change in ({"hidden_size": "wide"}, {"hidden_size": 15}, {"hidden_size": 32}, {"model_type": "nothing"}):
        (tmp_path / CONFIG).write_text(json.dumps({**config, **change}))
        with pytest.raises(ValueError, match="does not hold the weights that it describes") as caught:
            grassy.load(tmp_path)
        assert "\n" not in str(caught.value)
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        grassy.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"label_names": ["v", "w", "x", "y", "z"]}, "label_names"),
        ({HEAD: {"name": "grassmann", "k": [1, 2, 3, 2, 1], "gamma": 3.0}}, HEAD),
        ({"architecture": "resnet18"}, "architecture"),
        ({"pretrained_cfg": {"crop_pct": 0.5}}, "crop_pct"),
    ],
)
def test_a_config_of_timm_that_was_changed_is_refused_and_not_passed_over(change, name, tmp_path):
    grassy.save(of_timm("test_resnet"), tmp_path, ["a", "b", "c", "d", "e"])
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**config, **change}))
    with pytest.raises(
        ValueError, match=rf"config\.json and the description in model\.safetensors have different values of {name}:"
    ):
        grassy.load(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps({**config, "num_classes": "five"}))
    with pytest.raises(ValueError, match=r"config\.json cannot be read: num_classes must be an integer"):
        grassy.load(tmp_path)


def test_a_description_of_a_timm_model_may_not_place_its_head(tmp_path):
    grassy.save(of_timm("test_resnet"), tmp_path)
    save_file(load_file(tmp_path / WEIGHTS), tmp_path / WEIGHTS)
    config = json.loads((tmp_path / CONFIG).read_text())
    for option, said in (("device", "without device, got 'meta'"), ("model", "has no option 'model'")):
        (tmp_path / CONFIG).write_text(json.dumps({**config, HEAD: {**config[HEAD], option: "meta"}}))
        with pytest.raises(ValueError, match=said):
            grassy.load(tmp_path)


def test_weights_in_pickles_are_never_opened(tmp_path):
    pytest.importorskip("peft")
    grassy.save(of_transformers("bert"), tmp_path / "base")
    with_adapters(grassy.load(tmp_path / "base")).save_pretrained(tmp_path / "adapters")
    for folder, safe, pickled, said in (
        ("adapters", "adapter_model.safetensors", "adapter_model.bin", r"adapters has no adapter_model\.safetensors"),
        ("base", WEIGHTS, "pytorch_model.bin", "does not hold the weights that it describes: .*safetensors"),
    ):
        file = tmp_path / folder / safe
        torch.save(load_file(file), file.with_name(pickled))
        file.unlink()
        with pytest.raises(ValueError, match=said) as caught:
            grassy.load(tmp_path / folder)
        assert "\n" not in str(caught.value)
        if folder == "adapters":
            file.with_name(pickled).unlink()


def test_weights_that_are_missing_are_not_made_up(tmp_path):
    grassy.save(of_transformers("bert"), tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    (key,) = [key for key in tensors if key.endswith("classifier.weight")]
    save_file({name: tensor for name, tensor in tensors.items() if name != key}, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError, match=r"does not hold the weights that it describes: look at classifier\.weight"):
        grassy.load(tmp_path)


def test_what_cannot_be_saved_is_refused_by_name(tmp_path):
    model = of_transformers("bert")
    with pytest.raises(ValueError, match=r"path must be a folder or end in \.safetensors, got .*model\.pt"):
        grassy.save(model, tmp_path / "model.pt")
    for path, options in (("model.safetensors", {}), ("folder", {"img_size": 32})):
        with pytest.raises(ValueError, match="is a model of transformers: give a folder, and class_names"):
            grassy.save(model, tmp_path / path, **options)
    with pytest.raises(ValueError, match="class_names has 1 names, but the head has 5 classes"):
        grassy.save(model, tmp_path / "folder", ["a"])
    with pytest.raises(ValueError, match=r"has no head of grassy's: call grassy\.replace_head"):
        grassy.save(TRANSFORMERS["bert"](), tmp_path / "folder")
    (tmp_path / "file").write_text("")
    for each in (model, of_timm("test_resnet")):
        with pytest.raises(ValueError, match="file is a file: name a folder"):
            grassy.save(each, tmp_path / "file")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    grassy.save(model, tmp_path / "text")
    with pytest.raises(ValueError, match=r"holds a model of transformers: use grassy\.load, the commands take timm's"):
        validate(tmp_path / "text", None)


@pytest.mark.slow
def test_a_text_model_is_the_first_thing_that_a_process_loads(tmp_path):
    """Beside a CPU build of torch, transformers stops at torchvision unless that is imported with care."""
    grassy.save(of_transformers("bert"), tmp_path / "bert")
    code = f"import grassy; print(type(grassy.load({str(tmp_path / 'bert')!r})).__name__)"
    environment = {**os.environ, "PYTHONPATH": str(Path(grassy.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "WithHead" or "Bert" in done.stdout
