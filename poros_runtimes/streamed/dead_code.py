"""What a recompute computes and no gradient needs.

[Note: Dead code]
A recompute is there for what autograd saves of it. What comes after the last of that, such as a
block's last matrix product and the dequantised weight that it reads, is dead code: its operations
are left out of the backward that is captured, and memory that nobody reads stands for what they
would have returned. Which ones they are is found once for every length and kind of block, and
proved: the backward is run again with dead results full of NaN, and must give the same gradients,
bit for bit, from a block before anything is left out of it. Operations draw the random numbers that
they drew before: those that draw some are never dead, nor those that write to what they were given.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from attrs import frozen
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from poros_runtimes.streamed.arena import not_filled
from poros_runtimes.streamed.block import Block
from poros_runtimes.streamed.block_call import BlockCall
from poros_runtimes.streamed.executor import differentiate

__all__ = ["DeadCode", "Leaving", "Proofs", "Recording", "leaving"]

_POISONED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Types that have a NaN."""

_DETACH = torch.ops.aten.detach.default
"""Does not count: autograd calls it for what hooks save, so more often while a recompute is
followed. It returns what it was given."""

Use = Literal["live", "view", "value"]


@frozen
class DeadCode:
    """Which operations of a recompute no gradient needs.

    Attributes:
        names: of all operations, in order.
        dead: the numbers of those that can be left out.
    """

    names: tuple[str, ...]
    dead: frozenset[int]


@frozen
class _Operation:
    """One operation: the values that it reads and returns, and what it is there for. One that is
    ``"live"`` has other effects; a ``"view"`` returns what it read."""

    name: str
    reads: frozenset[int]
    returns: frozenset[int]
    use: Use


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows which values a recompute's operations read and return, and which autograd saves.

    A value is told by its storage, which may be another value's once it is freed: so each storage
    that an operation returns is a new value, unless it is one of those that it was given.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[_Operation] = []
        self._values: dict[int, int] = {}
        self._count = 0
        self._saved: set[int] = set()

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Return a context for the recompute."""
        with torch.autograd.graph.saved_tensors_hooks(self._save, _same), self:
            yield

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and note what it read and returned."""
        kwargs = kwargs or {}
        if func is _DETACH:
            return func(*args, **kwargs)
        given = {_storage(t) for t in _tensors((args, kwargs))}
        reads = frozenset(self._value(storage) for storage in given)
        out = func(*args, **kwargs)
        returned = _tensors(out)
        aliased = any(_storage(tensor) in given for tensor in returned)
        returns = frozenset(
            self._value(_storage(t)) if _storage(t) in given else self._new(_storage(t))
            for t in returned
        )
        effects = (
            not returned
            or not given
            or func._schema.is_mutable
            or torch.Tag.nondeterministic_seeded in func.tags
            or any(tensor.dtype not in _POISONED for tensor in returned)
        )
        use: Use = "live" if effects else "view" if aliased else "value"
        self._operations.append(_Operation(str(func), reads, returns, use))
        return out

    def _value(self, storage: int) -> int:
        return self._values[storage] if storage in self._values else self._new(storage)

    def _new(self, storage: int) -> int:
        self._count += 1
        self._values[storage] = self._count
        return self._count

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        self._saved.add(self._value(_storage(tensor)))
        return tensor

    def dead_code(self) -> DeadCode:
        """Return what was found."""
        live, dead = set(self._saved), set[int]()
        for number in range(len(self._operations) - 1, -1, -1):
            operation = self._operations[number]
            if operation.use == "live" or (operation.use == "value" and operation.returns & live):
                live |= operation.reads
            elif operation.use == "value":
                dead.add(number)
        return DeadCode(tuple(each.name for each in self._operations), frozenset(dead))


class Leaving(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves dead code out of a recompute."""

    def __init__(self, code: DeadCode, *, poison: bool = False) -> None:
        """Start at the first operation.

        Args:
            code: what is dead.
            poison: fill with NaN what stands for dead results.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._code = code
        self._poison = poison
        self._next = 0
        self._same = True

    @property
    def held(self) -> bool:
        """Whether the operations were those that were expected. If not, what they gave is void."""
        return self._same and self._next == len(self._code.names)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, or return memory in place of its results."""
        kwargs = kwargs or {}
        if func is _DETACH:
            return func(*args, **kwargs)
        number, names = self._next, self._code.names
        self._next += 1
        self._same = self._same and number < len(names) and names[number] == str(func)
        if not self._same or number not in self._code.dead:
            return func(*args, **kwargs)
        device = _tensors((args, kwargs))[0].device
        try:
            out = func(*_on_meta(args), **_on_meta(kwargs))
        except (NotImplementedError, RuntimeError):  # nobody can say what it would return
            return func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda like: self._memory(like, device), out)

    def _memory(self, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        with not_filled():
            memory = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        return memory.fill_(torch.nan) if self._poison else memory


class Proofs:
    """What is known to be dead, and of which blocks that was proved."""

    def __init__(self) -> None:
        self._proved: weakref.WeakKeyDictionary[Block, set[DeadCode]] = weakref.WeakKeyDictionary()

    def proved(self, block: Block, code: DeadCode | None) -> DeadCode | None:
        """Return the code if it was proved to be dead in this block."""
        return code if code is not None and code in self._proved.get(block, ()) else None

    def find(
        self,
        call: BlockCall,
        inputs: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        gradients: Sequence[torch.Tensor | None],
        found: Sequence[torch.Tensor | None],
    ) -> DeadCode | None:
        """Look for dead code in a backward whose units are bound; see [Note: Dead code].

        Args:
            call: the call.
            inputs: the tensors that the forward was given.
            wanted: which inputs, then which parameters, want gradients.
            gradients: of what left.
            found: what this backward gave.
        """
        if _compiles():
            return None
        backward = partial(differentiate, call, inputs, wanted, gradients, rng=True)
        recording = Recording()
        if not _same_gradients(backward(around=recording.recompute()), found):
            return None
        code = recording.dead_code()
        poisoned = Leaving(code, poison=True)
        if not code.dead or not _same_gradients(backward(around=poisoned), found):
            return None
        if not poisoned.held:
            return None
        self._proved.setdefault(call.block, set()).add(code)
        return code


def leaving(code: DeadCode | None) -> Leaving | None:
    """Return what leaves dead code out; None if there is nothing to leave out, or code that was
    compiled would not run as it is."""
    return None if code is None or _compiles() else Leaving(code)


def _compiles() -> bool:
    """Whether anything was compiled in this process: compiled code is not followed, and would not
    be run as it is if somebody followed."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


def _same_gradients(
    some: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None]
) -> bool:
    """Whether gradients are equal, bit for bit."""
    return all(
        a is b or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(some, others, strict=True)
    )


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _on_meta(tree: Any) -> Any:
    return pytree.tree_map_only(
        torch.Tensor,
        lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"),
        tree,
    )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
