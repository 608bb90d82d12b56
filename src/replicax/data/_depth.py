"""Pipelines of any depth: every few nodes, calls continue on the stack of another thread.

A node asks its input and a stream pulls from the one before it, so that calls are nested as deeply
as a pipeline has transformations. Python allows about a thousand nested calls in each thread, and a
new thread begins with none. Pipelines that are not deep never come here.
"""

from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import partial, wraps
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar, cast, final

from replicax._threads import new_thread

# Nodes whose calls share a stack: each takes up to six frames, and the user's own code comes first.
_NODES_PER_STACK = 40
_FEW_NODES = 4  # so few ways lead through these that asking again costs less than remembering
_JOIN_SECONDS = 1.0

_answers: ContextVar[dict[Any, Any] | None] = ContextVar("replicax_answers", default=None)
_F = TypeVar("_F", bound=Callable[..., Any])


class Deep(Protocol):
    """A node, as far as this module knows it."""

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The nodes that this one reads from."""
        ...


def needs_stack(node: Deep) -> bool:
    """Whether calls that come to this node must continue on another stack."""
    return not depth_of(node) % _NODES_PER_STACK


def is_deep(node: Deep) -> bool:
    """Whether there is such a node here or below."""
    return depth_of(node) >= _NODES_PER_STACK


def depth_of(node: Deep) -> int:
    """How many nodes there are from here to the farthest source."""
    depth: int | None = vars(node).get("_depth")
    if depth is not None:
        return depth
    pending = [node]
    while pending:
        current = pending[-1]
        inputs = current.inputs
        missing = [part for part in inputs if "_depth" not in vars(part)]
        if missing:
            pending.extend(missing)
            continue
        vars(current)["_depth"] = 1 + max((vars(part)["_depth"] for part in inputs), default=0)
        pending.pop()
    return cast("int", vars(node)["_depth"])


def on_new_stack(call: Callable[[], Any]) -> Any:
    """The result of a call that begins with an empty stack."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised below
            errors.append(error)

    thread = new_thread(copy_context().run, run, name="replicax-stack")
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()
    return results.pop()


def once(question: _F) -> _F:
    """Ask a node that stands in several places of a graph once, for each question from outside.

    A dataset concatenated with itself n times has 2**n ways from its end to its source.
    """

    @wraps(question)
    def ask(node: Any, *args: Any) -> Any:
        if depth_of(node) <= _FEW_NODES:
            return question(node, *args)
        known = _answers.get()
        if known is None:
            return answering(partial(ask, node, *args))
        key = (question, id(node), args)
        if key not in known:
            call = partial(question, node, *args)
            answer = on_new_stack(call) if needs_stack(node) else call()
            known[key] = (node, answer)  # the node too, or another gets its id
        return known[key][1]

    return cast("_F", ask)


def answering(call: Callable[[], Any]) -> Any:
    """Call a function in which nodes are asked each question of `once` only once."""
    if _answers.get() is not None:
        return call()
    token = _answers.set({})
    try:
        return call()
    finally:
        _answers.reset(token)


def remembered(
    question: Callable[[Any], Any], is_final: Callable[[Any], bool] = lambda _: True
) -> Callable[[Any], Any]:
    """Ask a node once and for all, where its answer never changes.

    Args:
        question: What to ask.
        is_final: Says of an answer whether it is the last one.
    """
    name = f"_{question.__qualname__}"
    asked = once(question)

    @wraps(question)
    def ask(node: Any) -> Any:
        known = vars(node)
        if name in known:
            return known[name]
        answer = asked(node)
        if is_final(answer):
            known[name] = answer
        return answer

    return ask


@final
class Elsewhere:
    """An object whose methods run in a thread of their own, one after the other.

    The thread does not refer to this object, so that garbage collection ends it.

    Args:
        target: The object; it has a method ``close``.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._asked: SimpleQueue[Any] = SimpleQueue()
        self._answered: SimpleQueue[Any] = SimpleQueue()
        self._number = 0
        self._is_running = False

    def ask(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a method and wait for its result; None if the thread has ended, or takes longer."""
        if not self._is_running:
            arguments = self._target, self._asked, self._answered
            stop = partial(self._asked.put, None)
            new_thread(_serve, *arguments, name="replicax-stack", stop=stop).start()
            self._is_running = True
        # An answer that an interrupt kept from being taken has an earlier number.
        self._number += 1
        self._asked.put((self._number, copy_context(), method, args))
        with suppress(Empty):
            while True:
                number, result, error = self._answered.get(timeout=timeout)
                if error is not None and number == self._number:
                    try:
                        raise error
                    finally:
                        del error  # or its trace would keep this frame alive
                if number in (self._number, None):
                    return result
        return None

    def close(self) -> None:
        """Close the object, and end the thread."""
        if self._is_running:
            self.ask("close", timeout=_JOIN_SECONDS)
            self._asked.put(None)
        else:
            on_new_stack(self._target.close)

    def __del__(self) -> None:
        self._asked.put(None)


def _serve(target: Any, asked: SimpleQueue[Any], answered: SimpleQueue[Any]) -> None:
    while (request := asked.get()) is not None:
        number, context, method, args = request
        try:
            answered.put((number, context.run(getattr(target, method), *args), None))
        except BaseException as error:  # raised where it was asked
            answered.put((number, None, error))
        del request, context, args
    target.close()
    answered.put((None, None, None))
