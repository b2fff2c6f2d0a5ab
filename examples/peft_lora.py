"""LoRA on the backbone and subspaces on top: first the head, then the adapter. PEFT trains and keeps the head whole.

python examples/peft_lora.py    # needs: pip install peft transformers
"""

import peft
import torch
import transformers
from sklearn.model_selection import train_test_split

import grassy
from texts import load_texts, train_tokenizer

transformers.set_seed(0)
texts, labels = load_texts()
texts, test_texts, labels, test_labels = train_test_split(texts, labels, random_state=0, stratify=labels)
tokenizer = train_tokenizer(texts)

config = transformers.BertConfig(
    vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128,
    max_position_embeddings=64, num_labels=4,
)  # fmt: skip
model = transformers.BertForSequenceClassification(config)  # here a pretrained one
grassy.replace_head(model)
lora = peft.LoraConfig(task_type="SEQ_CLS", r=16, lora_alpha=32, target_modules=["query", "value", "word_embeddings"])
model = peft.get_peft_model(model, lora)
optimizer = grassy.make_optimizer(model, "adamw", lr=1e-2, head_lr=0.1)


def batch(rows):
    encoded = tokenizer([texts[i] for i in rows], truncation=True, max_length=64, padding=True, return_tensors="pt")
    return {**encoded, "labels": torch.tensor([labels[i] for i in rows])}


for _ in range(3):
    for rows in torch.randperm(len(texts)).split(32):
        optimizer.zero_grad()
        model(**batch(rows.tolist())).loss.backward()
        grassy.clip_grad_norm_(model, 1.0)
        optimizer.step()

model.eval()
with torch.inference_mode():
    encoded = tokenizer(test_texts, truncation=True, max_length=64, padding=True, return_tensors="pt")
    logits = model(**encoded).logits
accuracy = float((logits.argmax(-1) == torch.tensor(test_labels)).float().mean())
(head,) = [head for name, head in model.named_modules() if name.endswith("classifier.modules_to_save.default")]
error = float(grassy.geometry.orthonormality_error(head.weight.detach()))
trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
total = sum(p.numel() for p in model.parameters())
print(f"accuracy {accuracy:.3f} with {trained / total:.0%} of the weights, bases are orthonormal to {error:.1e}")

merged = model.merge_and_unload()  # a plain model again, with its head
with torch.inference_mode():
    difference = float((merged(**encoded).logits - logits).abs().max())
print(f"merged: logits differ by {difference:.1e}")
