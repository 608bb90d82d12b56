"""Recursion over graphs of any depth, by continuing on a new thread's stack every few nodes.

Node properties recurse into the inputs and streams pull from their inputs, so calls nest as deeply
as a pipeline has transformations. Python limits recursion to about 1,000 frames per thread, and a
new thread starts with an empty stack. Shallow pipelines never use another thread.
"""

from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import partial, wraps
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar, cast, final

from replicax._src.base.threads import new_thread

# Nodes per stack. Each needs up to six frames, and user code already occupies part of the stack.
_NODES_PER_STACK = 40
_FEW_NODES = 4  # up to this depth there are so few paths that memoizing costs more than it saves
_JOIN_SECONDS = 1.0

_memo: ContextVar[dict[Any, Any] | None] = ContextVar("replicax_memo", default=None)
_F = TypeVar("_F", bound=Callable[..., Any])


class GraphNode(Protocol):
    """The part of `Node` that this module uses."""

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The nodes that this one reads from."""
        ...


def needs_stack(node: GraphNode) -> bool:
    """Whether calls that reach this node must continue on another stack."""
    return not depth_of(node) % _NODES_PER_STACK


def is_deep(node: GraphNode) -> bool:
    """Whether `needs_stack` holds for this node or one of its transitive inputs."""
    return depth_of(node) >= _NODES_PER_STACK


def depth_of(node: GraphNode) -> int:
    """Return the number of nodes on the longest path from this node to a source."""
    depth: int | None = vars(node).get("_depth")
    if depth is not None:
        return depth
    pending = [node]  # an explicit stack: the graph may be deeper than Python's recursion limit
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
    """Return the result of `call`, run on a new thread with the current context."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # re-raised on the calling thread
            errors.append(error)

    thread = new_thread(copy_context().run, run, name="replicax-stack")
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()
    return results.pop()


def once(query: _F) -> _F:
    """Memoize `query(node, *args)` per node during one outermost call.

    Nodes are shared: a dataset concatenated with itself n times has 2**n paths from its end to its
    source, and without a memo a recursive query would visit every one of them.
    """

    @wraps(query)
    def ask(node: Any, *args: Any) -> Any:
        if depth_of(node) <= _FEW_NODES:
            return query(node, *args)
        memo = _memo.get()
        if memo is None:
            return with_memo(partial(ask, node, *args))
        key = (query, id(node), args)
        if key not in memo:
            call = partial(query, node, *args)
            result = on_new_stack(call) if needs_stack(node) else call()
            memo[key] = (node, result)  # keep the node alive, or its id could be reused
        return memo[key][1]

    return cast("_F", ask)


def with_memo(call: Callable[[], Any]) -> Any:
    """Return the result of `call`, during which all queries decorated with `once` share a memo."""
    if _memo.get() is not None:
        return call()
    token = _memo.set({})
    try:
        return call()
    finally:
        _memo.reset(token)


def cached_on_node(
    query: Callable[[Any], Any], is_final: Callable[[Any], bool] = lambda _: True
) -> Callable[[Any], Any]:
    """Cache the result of `query(node)` on the node for its lifetime.

    Args:
        query: The function to cache.
        is_final: Whether a result can no longer change; other results are not cached.
    """
    name = f"_{query.__qualname__}"
    memoized = once(query)

    @wraps(query)
    def ask(node: Any) -> Any:
        cache = vars(node)
        if name in cache:
            return cache[name]
        result = memoized(node)
        if is_final(result):
            cache[name] = result
        return result

    return ask


@final
class ThreadProxy:
    """A proxy that runs the methods of an object on a dedicated thread, one call at a time.

    The thread holds no reference to the proxy, so garbage collecting the proxy ends the thread.

    Args:
        target: The object; it has a method ``close``.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._responses: SimpleQueue[Any] = SimpleQueue()
        self._number = 0
        self._is_running = False

    def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Return the result of a method; None if the thread has ended or `timeout` expires."""
        if not self._is_running:
            arguments = self._target, self._requests, self._responses
            stop = partial(self._requests.put, None)
            new_thread(_serve, *arguments, name="replicax-stack", stop=stop).start()
            self._is_running = True
        # Requests are numbered because an interrupted call leaves its response in the queue;
        # responses with an earlier number are dropped.
        self._number += 1
        self._requests.put((self._number, copy_context(), method, args))
        with suppress(Empty):
            while True:
                number, result, error = self._responses.get(timeout=timeout)
                if error is not None and number == self._number:
                    try:
                        raise error
                    finally:
                        del error  # its traceback refers to this frame: break the cycle
                if number in (self._number, None):
                    return result
        return None

    def close(self) -> None:
        """Close the object and end the thread."""
        if self._is_running:
            self.call("close", timeout=_JOIN_SECONDS)
            self._requests.put(None)
        else:
            on_new_stack(self._target.close)

    def __del__(self) -> None:
        self._requests.put(None)


def _serve(target: Any, requests: SimpleQueue[Any], responses: SimpleQueue[Any]) -> None:
    """Run requests until one is None, then close `target`; the body of the thread."""
    while (request := requests.get()) is not None:
        number, context, method, args = request
        try:
            responses.put((number, context.run(getattr(target, method), *args), None))
        except BaseException as error:  # re-raised on the calling thread
            responses.put((number, None, error))
        del request, context, args  # do not keep them alive while waiting for the next request
    target.close()
    responses.put((None, None, None))
