"""A million classes on one GPU: the loss never holds the logits of all classes, and momentum takes half the memory.

    python examples/million_classes.py                             # a GPU with 32 GB: a million classes; a CPU: 20,000
    python examples/million_classes.py --classes 20000 --plain     # all logits, and momentum in float32, to compare
    python examples/million_classes.py --classes 20000 --sample 0.1     # a tenth of the classes in each step

It prints the time of each step and the peak of memory. An input holds the bits of an identity number, with noise. Every
step trains on the same batch, so a falling loss shows that the gradients are right, and says nothing about accuracy.
"""

import argparse
import contextlib
import resource
import statistics
import sys
import time

import torch
from torch import nn

import grassy

GPU = torch.cuda.is_available()
BITS = 20  # enough for a million identities
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--classes", type=int, default=1_000_000 if GPU else 20_000)
parser.add_argument("--k", type=int, default=4, help="dimension of the subspace of a class")
parser.add_argument("--features", type=int, default=512 if GPU else 64, help="width of the features")
parser.add_argument("--batch-size", type=int, default=1024)
parser.add_argument("--steps", type=int, default=10 if GPU else 5)
parser.add_argument("--sample", type=float, default=1.0, help="share of the classes that take part in a step")
parser.add_argument("--plain", action="store_true", help="spend memory as an ordinary layer would")
args = parser.parse_args()
device = "cuda" if GPU else "cpu"


def peak() -> float:
    """The largest memory so far in GiB: of the GPU's tensors, or of this whole process."""
    if GPU:
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


torch.manual_seed(0)
labels = torch.randint(args.classes, (args.batch_size,), device=device)
bits = labels.unsqueeze(-1) >> torch.arange(BITS, device=device) & 1
inputs = 2.0 * bits - 1 + 0.3 * torch.randn(bits.shape, device=device)

backbone = nn.Sequential(nn.Linear(BITS, 512), nn.ReLU(), nn.Linear(512, args.features)).to(device)
head = grassy.create_head(
    "grassmann", args.features, args.classes, k=args.k, gamma="auto", standardize=True, device=device,
    fuse_loss=not args.plain, sample=args.sample,
)  # fmt: skip
model = nn.Sequential(backbone, head)
optimizer = grassy.make_optimizer(model, "adamw", lr=3e-3, head_lr=0.1, bfloat16_momentum=not args.plain)
print(f"{args.classes:,} classes, weight {head.weight.nbytes / 2**30:.2f} GiB, peak so far {peak():.2f} GiB")

losses, seconds = [], []
for step in range(args.steps):
    begin = time.perf_counter()
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16) if GPU else contextlib.nullcontext():
        loss = grassy.classification_loss(model, inputs, labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())  # waits for the GPU
    seconds.append(time.perf_counter() - begin)
    print(f"step {step}: loss {losses[-1]:.3f}, {1000 * seconds[-1]:.0f} ms", flush=True)

print(f"coordinates of the batch in all subspaces: {args.batch_size * args.classes * args.k * 4 / 2**30:.2f} GiB")
print(f"peak of memory {peak():.2f} GiB, median step {1000 * statistics.median(seconds):.0f} ms")
error = float(grassy.geometry.orthonormality_error(head.weight.detach()))
print(f"bases are orthonormal to {error:.1e}")
