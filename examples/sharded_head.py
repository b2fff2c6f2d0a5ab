"""The classes of a head sharded over processes, beside DDP, or FSDP2 for the backbone. Losses are those of one process.

    torchrun --nproc-per-node 2 examples/sharded_head.py            # gloo on CPUs, NCCL on GPUs
    torchrun --nproc-per-node 2 examples/sharded_head.py --fsdp     # the backbone sharded as well
    torchrun --nproc-per-node 1 examples/sharded_head.py            # the same losses in one process

Each process holds some classes whole, so the step of the optimizer needs no communication. The data are made up: a
class is a point on a sphere, and its images lie around it.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import grassy

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--classes", type=int, default=2_000)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--fsdp", action="store_true", help="shard the backbone, too")
args = parser.parse_args()

GPU = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPU else torch.device("cpu")
if GPU:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if GPU else "gloo")
mesh = grassy.distributed.mesh()
rank, processes = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same backbone and the same data in all processes
centres = nn.functional.normalize(torch.randn(args.classes, 64), dim=-1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.Linear(128, 1)).to(device)
# A head on the meta device has no values: shard_head draws those of each process, so the whole head never exists.
grassy.replace_head(model, "grassmann", args.classes, k=4, gamma="auto", device="meta")
grassy.distributed.shard_head(model, mesh, seed=0)
trained = grassy.distributed.wrap(model, mesh, fsdp=args.fsdp)
optimizer = grassy.make_optimizer(trained, "adamw", lr=3e-3, head_lr=0.1)


def batch(rows: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels of this process: all processes draw the same batch, and each keeps its rows."""
    labels = torch.randint(args.classes, (rows,))
    images = centres[labels] + 0.05 * torch.randn(rows, 64)
    return images.chunk(processes)[rank].to(device), labels.chunk(processes)[rank].to(device)


for step in range(args.steps):
    images, labels = batch()
    optimizer.zero_grad()
    loss = grassy.classification_loss(trained, images, labels)  # the mean over this process's rows, as under DDP
    loss.backward()
    grassy.clip_grad_norm_(trained, 5.0)
    optimizer.step()
    if step % 20 == 0 or step == args.steps - 1:
        dist.all_reduce(mean := loss.detach().clone())
        if rank == 0:
            print(f"step {step}: loss {mean / processes:.4f}", flush=True)

trained.eval()
images, labels = batch()
with torch.no_grad():
    found = trained(images).argmax(-1)  # gathers all logits; beyond 2**26 of them, ask head.top(features, 1)
correct = (found == labels).float().mean()
dist.all_reduce(correct)
local = model[-1].weight.to_local()
error = grassy.geometry.orthonormality_error(local)
dist.all_reduce(error, dist.ReduceOp.MAX)
if rank == 0:
    print(
        f"{processes} processes, {len(local)} of {args.classes} classes in the first, top-1 {correct / processes:.3f}"
    )
    print(f"bases are orthonormal to {error:.1e}")
dist.destroy_process_group()
