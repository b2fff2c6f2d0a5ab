"""How the target of `classification_loss` reaches a head inside the forward of a model.

A request lives for one thread and one forward pass. Activation checkpointing repeats that forward in the backward, when
the request is gone, and perhaps in an autograd thread. A hook on the loss records the backward passes that go through
it. A head that is called inside such a backward pass finds the request again.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from grassy.criteria import Criterion


@dataclass(frozen=True, eq=False)
class LossRequest:
    """What `grassy.classification_loss` passes to a head for one forward pass of the model.

    Args:
        target: Class indices or probabilities.
        criterion: A callable `criterion(logits, target)`.
        alone: Whether the model has a single head. A model with several may average their logits.
        with_gradient: Whether autograd was enabled when the loss was requested.
        backwards: Autograd's ids of the backward passes that went through the loss.
    """

    target: Any  # a tensor, or MixedLabels for heads that accept them
    criterion: Criterion
    alone: bool = True
    with_gradient: bool = True
    backwards: set[int] = field(default_factory=set)


class Inbox:
    """Holds one request per thread. A copy, by deepcopy or pickle, is empty.

    Compiled code cannot read thread-local storage in every version of torch. It gets the latest request of any thread,
    so threads that share a compiled model take turns (see `delivered`).
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._latest: LossRequest | None = None
        self.turn = threading.RLock()
        #: Whether compiled code read the latest request while autograd was off, as inside a reentrant checkpoint.
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


#: Requests by head. The graph of the loss keeps them alive.
_unfinished: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[LossRequest]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _BackwardPass:
    """Lives as long as a backward pass, even one that fails, because autograd holds it as a callback."""

    def __call__(self) -> None:
        pass


#: The running backward passes that went through the loss of a request, by autograd's id.
_under_way: weakref.WeakValueDictionary[int, _BackwardPass] = weakref.WeakValueDictionary()


@contextmanager
def delivered(inboxes: Iterable[Inbox], request: LossRequest, take_turns: bool = False) -> Iterator[None]:
    """Context manager that puts the request into the inboxes for this thread.

    With `take_turns`, other threads that deliver to the same inboxes wait, which compiled code needs.
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
    """Let the heads find the request again during the backward of the loss."""
    if loss.grad_fn is None:
        return
    with _lock:
        for head in heads:
            _unfinished.setdefault(head, weakref.WeakSet()).add(request)
    # Every backward of the loss starts at this node. The hook is the only reference that keeps the request alive.
    loss.grad_fn.register_prehook(lambda _: _note_backward(request))


def _note_backward(request: LossRequest) -> None:
    """Record that the current backward pass goes through the loss of the request, and until when it runs."""
    number = torch._C._current_graph_task_id()
    request.backwards.add(number)
    if not torch.compiler.is_compiling():  # compiled autograd cannot trace this
        _under_way[number] = under_way = _BackwardPass()
        torch.autograd.Variable._execution_engine.queue_callback(under_way)


def check_that_compiled_heads_are_not_recomputed(heads: Iterable[nn.Module], loss: Tensor) -> None:
    """Raise ValueError for a compiled head inside a reentrant checkpoint.

    Compiled code cannot ask whether it runs in a backward. A reentrant checkpoint turns autograd off in the forward and
    leaves its own node in the graph of the loss. `heads` are those whose compiled code read the request while autograd
    was off.
    """
    for head in heads:
        if _has_checkpoint(loss.grad_fn):
            raise ValueError(
                f"{type(head).__name__} is compiled inside a reentrant checkpoint, which would lose its target: "
                "compile the whole model instead, or leave the head out of the checkpoint"
            )


def _has_checkpoint(node: Any) -> bool:
    """Whether the graph below a node has a reentrant checkpoint, such as torch's CheckpointFunctionBackward."""
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
    """Return the request of the forward that the current backward pass recomputes, or None."""
    backward = torch._C._current_graph_task_id()
    if backward == -1:
        return None
    with _lock:
        requests = list(_unfinished.get(head, ()))
    found = [request for request in requests if backward in request.backwards]
    if len(found) == 1:
        return found[0]
    # A nested reentrant checkpoint runs a backward with an id of its own within the backward of the loss.
    if not found and not any(number in _under_way for request in requests for number in list(request.backwards)):
        return None
    why = (
        "several losses in one backward"
        if found
        else "a reentrant checkpoint inside another one, or two backward passes at once"
    )
    raise RuntimeError(
        f"{type(head).__name__} is recomputed in the backward and cannot tell for which target ({why}): call backward "
        "for each loss separately, with torch.utils.checkpoint(..., use_reentrant=False), or leave the head out of it"
    )
