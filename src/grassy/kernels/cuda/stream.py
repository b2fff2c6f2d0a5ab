"""The step of classes of 17 to 32 rows for which step.cu would need a cluster of thread blocks: three launches of
stream.cu.

Classes with lr |mu M + D| above 1, and with `max_angle` those whose mu M + D lies almost inside the subspace, need more
passes: on these `steps` returns a verdict, and step.cu is launched after it.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: In the order in which they are launched.
KERNELS = ("grams", "turns", "moves")
#: Classes that are taken together: what lies between the launches, 26 KiB a class, is not to become large.
AT_ONCE = 1024
#: Of a class, in numbers of 4 bytes: 20 tiles of Gram matrices; four factors.
TILES, FACTORS = 20 * 128, 4 * 32**2
#: Of a thread block: threads, and bytes of shared memory for the sums of four warps; nine matrices; split factors,
#: marks of rows, and columns of four warps.
STREAM_THREADS, TURN_THREADS = 128, 256
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
    """Step the classes of all heads; a verdict on each, AGAIN of launch.cuh if it is left to step.cu.

    like: a tensor on the device. pointers, values: learning rate, momentum, and the flag that skips a step or the
    largest angle, as step.cu takes them.
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
