"""Training in one or several processes, with heads whose classes may be sharded over them."""

from grassy.distributed.scaler import GradScaler
from grassy.distributed.sharding import is_sharded, mesh, shard_head, whole
from grassy.distributed.state import load_state, save_state
from grassy.distributed.wrapping import wrap

__all__ = ["GradScaler", "is_sharded", "load_state", "mesh", "save_state", "shard_head", "whole", "wrap"]
