"""The Trainer of transformers takes the optimizer. The model's own loss is right, since the head gives logits.

python examples/trainer_images.py    # needs: pip install transformers accelerate
"""

import torch
import transformers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import grassy

transformers.set_seed(0)
x, y = load_digits(return_X_y=True)
pixels = torch.tensor(x).float().reshape(-1, 1, 8, 8) / 16
rows = [{"pixel_values": image, "labels": int(label)} for image, label in zip(pixels, y, strict=True)]
train, test = train_test_split(rows, random_state=0)

config = transformers.ViTConfig(
    hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
    image_size=8, patch_size=2, num_channels=1, num_labels=10,
)  # fmt: skip
model = transformers.ViTForImageClassification(config)
grassy.replace_head(model)

trainer = transformers.Trainer(
    model,
    transformers.TrainingArguments(
        "trained-images",
        num_train_epochs=6,
        per_device_train_batch_size=64,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=train,
    optimizers=(grassy.make_optimizer(model, "adamw", lr=3e-3, weight_decay=0.05, head_lr=0.1), None),
)
trainer.train()
predictions = trainer.predict(test)
accuracy = float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())
error = float(grassy.geometry.orthonormality_error(model.classifier.weight.detach()))
print(f"accuracy {accuracy:.3f}, bases are orthonormal to {error:.1e}")
