"""Work that several processes of one machine do together, connected by gloo."""

import multiprocessing
import os
import pickle
import secrets
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = 120


def on_ranks(world, folder, work):
    """`work(rank)` in so many processes, forked from this one; what each returned, or an error if one failed."""
    timeout = timedelta(seconds=PATIENCE)
    store, pipe = f"file://{folder}/store-{secrets.token_hex(4)}", multiprocessing.get_context("fork").SimpleQueue()

    def run(rank):
        torch.set_num_threads(1)
        try:
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timeout)
            pipe.put(pickle.dumps((rank, work(rank), None)))  # bytes: tensors would be shared memory
            dist.barrier()
        except BaseException:
            pipe.put(pickle.dumps((rank, None, traceback.format_exc())))
        os._exit(0)  # without waiting for threads of gloo

    processes = [multiprocessing.get_context("fork").Process(target=run, args=(rank,)) for rank in range(world)]
    for process in processes:
        process.start()
    answers = sorted((pickle.loads(pipe.get()) for _ in processes), key=lambda answer: answer[0])
    for process in processes:
        process.join(PATIENCE)
        process.kill()
    for rank, _, error in answers:
        assert error is None, f"rank {rank}: {error}"
    return [answer for _, answer, _ in answers]
