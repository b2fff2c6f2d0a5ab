"""Folders of the hub: the same logits come back, and timm and transformers read the rest without grassy."""

import copy
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as T
from safetensors.torch import load_file, save_file

import grassy
from grassy.heads import describe, heads_of
from grassy.inference.export import export
from grassy.runs.hub import CARD, CONFIG, WEIGHTS
from grassy.runs.weights import read_description

from .hub_models import HEADS, SMALL, TRANSFORMERS, VIT, C, inputs_of, logits, of_timm, of_transformers, with_adapters

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


@pytest.mark.parametrize("how", ["grassy.save", "save_pretrained"])
def test_models_that_share_a_config_are_saved_each_with_its_own_head(how, tmp_path):
    config = T.BertConfig(**SMALL, vocab_size=50)
    first, second = T.BertForSequenceClassification(config), T.BertForSequenceClassification(config)
    grassy.replace_head(first, "grassmann", k=2, gamma=7.0)
    grassy.replace_head(second, "cosine", scale=9.0, classifier="classifier")
    copied = copy.deepcopy(second)
    for name, model in (("first", first.eval()), ("second", second.eval()), ("copied", copied.eval())):
        if how == "grassy.save":
            grassy.save(model, tmp_path / name)
        else:
            model.save_pretrained(tmp_path / name)
        again = grassy.load(tmp_path / name)
        assert [describe(head) for head in heads_of(again)] == [describe(head) for head in heads_of(model)]
        assert torch.equal(logits(again, inputs_of("bert")), logits(model, inputs_of("bert")))
    assert pickle.loads(pickle.dumps(first)).config.grassy_head == first.config.grassy_head


def test_models_that_share_a_config_may_have_other_numbers_of_classes(tmp_path):
    config = T.BertConfig(**SMALL, vocab_size=50)
    first, second = T.BertForSequenceClassification(config), T.BertForSequenceClassification(config)
    grassy.replace_head(first, "grassmann", k=2)
    grassy.replace_head(second, "grassmann", num_classes=3, k=2)
    assert (config.num_labels, hasattr(config, "grassy_head")) == (C, False)
    for name, model in (("first", first.eval()), ("second", second.eval())):
        model.save_pretrained(tmp_path / name)
        assert torch.equal(logits(grassy.load(tmp_path / name), inputs_of("bert")), logits(model, inputs_of("bert")))


def test_a_pickled_model_that_shared_a_config_is_saved_with_its_own_head(tmp_path):
    config = T.BertConfig(**SMALL, vocab_size=50)
    first, second = T.BertForSequenceClassification(config), T.BertForSequenceClassification(config)
    grassy.replace_head(first, "grassmann", k=2)
    grassy.replace_head(second, "cosine")
    again = pickle.loads(pickle.dumps(first.eval()))
    again.save_pretrained(tmp_path)
    assert torch.equal(logits(grassy.load(tmp_path), inputs_of("bert")), logits(first, inputs_of("bert")))


def test_a_model_whose_head_was_taken_out_is_loaded_by_transformers_and_refused_here(tmp_path):
    model = of_transformers("bert")
    model.classifier = torch.nn.Linear(16, C)
    model.save_pretrained(tmp_path / "plain")
    again = T.BertForSequenceClassification.from_pretrained(tmp_path / "plain").eval()
    assert torch.equal(logits(again, inputs_of("bert")), logits(model, inputs_of("bert")))
    with pytest.raises(ValueError, match="does not hold the weights that it describes"):
        grassy.load(tmp_path / "plain")


# ---------------------------------------------------------------------- adapters


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
    with pytest.raises(ValueError, match=r"has PEFT adapters: save model\.merge_and_unload"):
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
    with pytest.raises(ValueError, match="describes no head: replace that model's head"):
        grassy.load(tmp_path / "adapters")


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
        with pytest.raises(ValueError, match=f"{wrong} could not be downloaded from the Hub"):
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


@pytest.mark.slow
def test_a_text_model_is_the_first_thing_that_a_process_loads(tmp_path):
    """Beside a CPU build of torch, transformers stops at torchvision unless that is imported with care."""
    grassy.save(of_transformers("bert"), tmp_path / "bert")
    code = f"import grassy; print(type(grassy.load({str(tmp_path / 'bert')!r})).__name__)"
    environment = {**os.environ, "PYTHONPATH": str(Path(grassy.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "WithHead" or "Bert" in done.stdout
