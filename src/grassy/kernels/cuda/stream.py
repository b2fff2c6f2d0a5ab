"""The step of classes with 17 to 32 rows that do not fit into one thread block: three launches of stream.cu.

Some classes need more passes: those with lr |mu M + D| > 1, and with `max_angle` those whose mu M + D lies almost
inside the subspace. For these `steps` returns the verdict AGAIN, and step.cu, launched afterwards, makes their step.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: In launch order.
KERNELS = ("grams", "turns", "moves")
#: Classes per launch, which bounds the intermediate memory of 26 KiB per class.
AT_ONCE = 1024
#: Intermediate floats per class: 20 tiles of Gram matrices, and four factors.
TILES, FACTORS = 20 * 128, 4 * 32**2
#: Threads per block.
STREAM_THREADS, TURN_THREADS = 128, 256
#: Bytes of shared memory per block. grams: the sums of four warps. turns: nine matrices. moves: split factors, marks of
#: absent rows, and columns of four warps.
SHARED = {"grams": 4 * 4 * TILES, "turns": 4 * 9 * 32**2, "moves": 4 * (32 * 256 + 32 + 4 * 2 * 32 * 36)}


def steps(
    kernels: Sequence[Any],
    heads: ctypes.Structure,
    classes: int,
    like: Tensor,
    pointers: Sequence[Tensor],
    values: Sequence[float],
    k: int,
    n: int,
    flags: int,
) -> Tensor:
    """Step the classes of all heads and return a verdict per class: AGAIN of launch.cuh if step.cu has to make it.

    `like` is a tensor on the device. `pointers` (learning rate, momentum, skip flag) and `values` (learning rate,
    momentum, largest angle) are those of step.cu.
    """
    (lr, momentum, skip), (lr_value, momentum_value, max_angle) = pointers, values
    grams, turns, moves = kernels
    verdicts = torch.empty(classes, dtype=torch.int32, device=like.device)
    room = min(classes, AT_ONCE)
    tiles, factors = (like.new_empty(room * size, dtype=torch.float32) for size in (TILES, FACTORS))
    for first in range(0, classes, AT_ONCE):
        blocks = min(AT_ONCE, classes - first)
        sizes = [first, k, n, flags]
        arguments = [heads, momentum, skip, tiles, momentum_value, *sizes]
        grams.launch(blocks, STREAM_THREADS, SHARED["grams"], arguments)
        arguments = [heads, lr, skip, tiles, factors, verdicts, lr_value, max_angle, first, flags]
        turns.launch(blocks, TURN_THREADS, SHARED["turns"], arguments)
        arguments = [heads, momentum, skip, factors, verdicts, momentum_value, *sizes]
        moves.launch(blocks, STREAM_THREADS, SHARED["moves"], arguments)
    return verdicts
