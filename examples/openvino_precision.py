"""An exported model in OpenVINO. On CPUs with bfloat16 or float16 units it rounds by default: ask for float32.

python examples/openvino_precision.py    # needs: pip install openvino onnx onnxscript
"""

import openvino
import torch
from sklearn.datasets import load_digits
from torch import nn

import grassy

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x).float() / 16, torch.tensor(y)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
grassy.replace_head(model)
optimizer = grassy.make_optimizer(model, "adamw", lr=3e-3, head_lr=0.1)
for _ in range(5):
    for rows in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        grassy.classification_loss(model, x[rows], y[rows]).backward()
        optimizer.step()

model.eval()
batch = {"input": {0: torch.export.Dim("batch")}}
torch.onnx.export(model, (x[:2],), "digits.onnx", dynamo=True, dynamic_shapes=batch, verbose=False)
logits = model(x).detach()
core = openvino.Core()
differences = {}
for name, hint in {"float32": {"INFERENCE_PRECISION_HINT": "f32"}, "default": {}}.items():
    compiled = core.compile_model("digits.onnx", "CPU", hint)
    found = torch.from_numpy(compiled(x.numpy())[0])
    used = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    differences[name] = float((found - logits).abs().max())
    labels = int((found.argmax(-1) != logits.argmax(-1)).sum())
    print(f"{name} ({used}): logits differ by up to {differences[name]:.1e}, {labels} of {len(x)} labels")
