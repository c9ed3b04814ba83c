"""Functions that stop half-way, in the midst of somebody else's code, and go on later.

[Note: Routines]
The forward of a micro-batch goes through the user's loss function and Transformers' decoder, and
is to stop where a block begins. A generator cannot stop inside of calls that it did not make
itself, a thread can. So each micro-batch has a thread, of which never more than one is awake, and
none while its caller is: whoever resumes a routine sleeps until it asks for something, or ends.
Nothing that they share needs a lock.

Some of torch's state belongs to a thread: autocast, hooks on saved tensors, the default device, the
current stream. A routine starts with that of its maker. What it asks for is computed by the caller,
under the state that the routine had when it asked.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any

import torch
from attrs import field, frozen

__all__ = ["Ambient", "Routine"]


@frozen
class Ambient:
    """The state of torch that belongs to one thread.

    Attributes:
        autocast: per device type: enabled, dtype.
        cache: whether autocast keeps the casts of weights.
        saved: what packs and unpacks saved tensors; None where nothing does.
        default: where tensors are made of which nobody says where.
        stream: the current stream of the compute device; None on a CPU.
        current: the current CUDA device, which need not be the compute device; None on a CPU.
    """

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    saved: tuple[Any, Any] | None = field(repr=False)
    default: torch.device
    stream: Any
    current: int | None

    @classmethod
    def of_this_thread(cls, device: torch.device) -> Ambient:
        """Return the state that the calling thread has now.

        Args:
            device: the compute device.
        """
        types = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        bindings: Any = torch._C._autograd
        return cls(
            tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in types
            ),
            torch.is_autocast_cache_enabled(),
            # torch has no public way to ask; its own checkpointing asks in this way
            bindings._top_saved_tensors_default_hooks(False),
            torch.get_default_device(),
            torch.cuda.current_stream(device) if device.type == "cuda" else None,
            torch.cuda.current_device() if device.type == "cuda" else None,
        )

    @contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """Give the calling thread this state, and its own back afterwards.

        No region of autocast is entered: leaving one would drop the casts of all other threads.
        Where the two are on different streams, each waits for what the other has issued.
        """
        found = Ambient.of_this_thread(device)
        with ExitStack() as stack:
            if self.stream is not None:
                if self.stream != found.stream:
                    self.stream.wait_stream(found.stream)
                    stack.callback(found.stream.wait_stream, self.stream)
                stack.enter_context(torch.cuda.stream(self.stream))
                stack.enter_context(torch.cuda.device(self.current))
            if self.default != found.default:
                stack.enter_context(self.default)
            if self.saved is not None and self.saved != found.saved:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved))
            stack.callback(found._set_autocast)
            self._set_autocast()
            yield

    def _set_autocast(self) -> None:
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.cache)


class _Closed(BaseException):
    """Raised inside of a routine that nobody will resume any more."""


@frozen
class _Ended:
    """The end of a routine: what it returned, or what it raised."""

    value: Any
    error: BaseException | None


class Routine:
    """A function in a thread of its own; see [Note: Routines]."""

    def __init__(self, function: Callable[[], Any], *, device: torch.device, name: str) -> None:
        """Make a routine that has not started.

        Args:
            function: what runs.
            device: the compute device.
            name: of the thread.
        """
        self.ended = False
        self._function: Callable[[], Any] | None = function
        self._device = device
        self._ambient = Ambient.of_this_thread(device)
        self._closed = False
        self._said: SimpleQueue[Any] = SimpleQueue()
        self._replies: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name=name, daemon=True
        )
        self._started = False

    def resume(self, reply: Any = None, *, error: BaseException | None = None) -> Any:
        """Let the routine run until it asks for something, and return that; or until it ends, and
        return its result, with ``ended`` set.

        Args:
            reply: what it asked for.
            error: raised where it asked, instead of a reply.

        Raises:
            BaseException: whatever ended the routine.
        """
        if self._started:
            self._replies.put((reply, error))
        else:
            self._started = True  # before it is: an interrupt may come in between
            self._thread.start()
        del reply, error
        said = self._said.get()
        if not isinstance(said, _Ended):
            return said
        self._thread.join()
        self.ended = True
        if said.error is not None:
            try:
                raise said.error
            finally:
                del said  # its traceback has this frame in it
        return said.value

    def ask(self, request: Any) -> Any:
        """Inside of the routine: sleep until the caller replies to ``request``."""
        if self._closed:
            raise _Closed
        self._said.put(request)
        del request
        reply, error = self._replies.get()
        if error is not None:
            try:
                raise error
            finally:
                del error
        return reply

    def close(self) -> None:
        """End the routine wherever it stands, by an exception, and wait for that."""
        self._function = None
        if not self._started or self.ended:
            return
        self._closed = True
        self._replies.put((None, _Closed()))
        if self._thread.ident is not None:
            self._thread.join()
        self.ended = True

    def _run(self) -> None:
        function, self._function = self._function, None
        try:
            if function is None or self._closed:
                raise _Closed
            with self._ambient.entered(self._device):
                value = function()
        except BaseException as error:
            self._said.put(_Ended(None, error))
        else:
            self._said.put(_Ended(value, None))
