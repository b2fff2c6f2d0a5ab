"""How the target of `classification_loss` reaches a head inside the forward of a model.

A request is there for one thread and one forward pass. Activation checkpointing runs that forward again in the
backward, after the request is gone and perhaps in a thread of autograd: a hook on the loss notes in which backward
passes the request is wanted again, and a head that is called inside one of them finds it.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class LossRequest:
    """What `grassy.classification_loss` hands to a head for the length of one forward pass of the model."""

    target: Tensor
    criterion: Criterion
    #: Whether the head is the only one of the model. Of several, a model may average the logits.
    alone: bool = True
    #: Whether a gradient of the loss may be wanted.
    with_gradient: bool = True
    #: The backward passes that went through its loss, by the number that autograd gives to each.
    backwards: set[int] = field(default_factory=set)


class Inbox:
    """Holds the request of each thread. A copy, by deepcopy or pickle, is empty.

    Compiled code cannot read storage of a thread in every version of torch: it finds the latest request of all threads,
    so that threads which share a compiled model take turns (`delivered`).
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._latest: LossRequest | None = None
        self.turn = threading.RLock()
        #: Whether compiled code found the latest request while autograd was off, as inside a reentrant checkpoint.
        self.compiled_without_gradient = False

    @property
    def request(self) -> LossRequest | None:
        if torch.compiler.is_compiling():
            request = self._latest
            if request is not None and request.with_gradient and not torch.is_grad_enabled():
                self.compiled_without_gradient = True
            return request
        return getattr(self._of_thread, "request", None)

    def put(self, request: LossRequest | None) -> None:
        self._latest = request
        if not torch.compiler.is_compiling():
            self._of_thread.request = request

    def __reduce__(self) -> tuple[Any, ...]:
        return Inbox, ()


#: Requests whose loss is alive, by head: the graph of the loss holds them.
_unfinished: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[LossRequest]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _BackwardPass:
    """Lives as long as a backward pass, whether that succeeds or fails: autograd holds it as a callback."""

    def __call__(self) -> None:
        pass


#: The backward passes that go through the loss of a request at this moment, by their number.
_under_way: weakref.WeakValueDictionary[int, _BackwardPass] = weakref.WeakValueDictionary()


@contextmanager
def delivered(inboxes: Iterable[Inbox], request: LossRequest, take_turns: bool = False) -> Iterator[None]:
    """Within this, and in this thread, the request lies in the inboxes.

    take_turns: other threads that deliver to the same inboxes wait, as compiled code needs it.
    """
    before = [(inbox, inbox.request) for inbox in inboxes]
    with ExitStack() as turns:
        if take_turns:
            for inbox, _ in before:
                turns.enter_context(inbox.turn)
                inbox.compiled_without_gradient = False
        for inbox, _ in before:
            inbox.put(request)
        try:
            yield
        finally:
            for inbox, earlier in before:
                inbox.put(earlier)


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` or `module.compile()` was applied to the module itself."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def keep_for_recomputation(heads: Iterable[nn.Module], request: LossRequest, loss: Tensor) -> None:
    """Let the heads find the request again while the gradient of the loss is computed."""
    if loss.grad_fn is None:
        return
    with _lock:
        for head in heads:
            _unfinished.setdefault(head, weakref.WeakSet()).add(request)
    # All gradients of the model go through this node first. It keeps the request alive, and nothing else does.
    loss.grad_fn.register_prehook(lambda _: _note_backward(request))


def _note_backward(request: LossRequest) -> None:
    """Note that the backward pass of this moment goes through the loss of the request, and how long it lasts."""
    number = torch._C._current_graph_task_id()
    request.backwards.add(number)
    if not torch.compiler.is_compiling():  # compiled autograd cannot trace this
        _under_way[number] = under_way = _BackwardPass()
        torch.autograd.Variable._execution_engine.queue_callback(under_way)


def check_that_compiled_heads_are_not_recomputed(heads: Iterable[nn.Module], loss: Tensor) -> None:
    """Raise a ValueError for a compiled head inside a reentrant checkpoint.

    Compiled code cannot ask whether it runs in a backward. Such a checkpoint turns autograd off in the forward, and
    leaves a node of its own in the graph of the loss.

    heads: those whose compiled code found the request while autograd was off.
    """
    for head in heads:
        if _has_checkpoint(loss.grad_fn):
            raise ValueError(
                f"{type(head).__name__} is compiled inside a reentrant checkpoint, which would lose its target: "
                "compile the whole model instead, or leave the head out of the checkpoint"
            )


def _has_checkpoint(node: Any) -> bool:
    """Whether the graph below a node has a reentrant checkpoint: torch's is CheckpointFunctionBackward."""
    stack, seen = [node], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "Checkpoint" in node.name():
            return True
        stack.extend(following for following, _ in node.next_functions)
    return False


def recomputed(head: nn.Module) -> LossRequest | None:
    """The request that a forward inside a backward pass repeats; None outside of one, or if there was no request."""
    backward = torch._C._current_graph_task_id()
    if backward == -1:
        return None
    with _lock:
        requests = list(_unfinished.get(head, ()))
    found = [request for request in requests if backward in request.backwards]
    if len(found) == 1:
        return found[0]
    # The backward of a checkpoint inside another one has a number of its own, within the backward of the loss.
    if not found and not any(number in _under_way for request in requests for number in list(request.backwards)):
        return None
    why = (
        "several losses in one backward"
        if found
        else "a reentrant checkpoint inside another one, or two backward passes at once"
    )
    raise RuntimeError(
        f"{type(head).__name__} is recomputed in the backward and cannot tell for which target ({why}): call backward "
        "for each loss alone, with torch.utils.checkpoint(..., use_reentrant=False), or leave the head out of it"
    )
