"""Sequence classification with subspaces: a small BERT, trained by the Trainer, saved and used in a pipeline.

python examples/trainer_text.py    # needs: pip install transformers accelerate
"""

import transformers
from sklearn.model_selection import train_test_split

import grassy
from texts import MODULES, load_texts, train_tokenizer

transformers.set_seed(0)
texts, labels = load_texts()
texts, test_texts, labels, test_labels = train_test_split(texts, labels, random_state=0, stratify=labels)
tokenizer = train_tokenizer(texts)

config = transformers.BertConfig(
    vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128,
    max_position_embeddings=64, id2label=dict(enumerate(MODULES)), label2id={m: i for i, m in enumerate(MODULES)},
)  # fmt: skip
model = transformers.BertForSequenceClassification(config)
grassy.replace_head(model)


def dataset(texts, labels):
    encoded = tokenizer(texts, truncation=True, max_length=64)["input_ids"]
    return [{"input_ids": ids, "labels": label} for ids, label in zip(encoded, labels, strict=True)]


trainer = transformers.Trainer(
    model,
    transformers.TrainingArguments(
        "trained-text",
        num_train_epochs=6,
        per_device_train_batch_size=32,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=dataset(texts, labels),
    data_collator=transformers.DataCollatorWithPadding(tokenizer),
    optimizers=(grassy.make_optimizer(model, "adamw", lr=3e-3, weight_decay=0.01, head_lr=0.1), None),
)
trainer.train()
predictions = trainer.predict(dataset(test_texts, test_labels))
accuracy = float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())
error = float(grassy.geometry.orthonormality_error(model.classifier.weight.detach()))
print(f"accuracy {accuracy:.3f}, bases are orthonormal to {error:.1e}")

grassy.save(model, "saved-text")  # the format of transformers, with one more key in config.json
loaded = grassy.load("saved-text")
classify = transformers.pipeline("text-classification", model=loaded, tokenizer=tokenizer, device="cpu")
answer = classify("Return the arithmetic mean of the data.")[0]
print(f"the mean: {answer['label']} with probability {answer['score']:.2f}")
