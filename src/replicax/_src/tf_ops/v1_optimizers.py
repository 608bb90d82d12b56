"""The optimizers of `tf.compat.v1.train`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from replicax._src.base.types import ReduceOp
from replicax._src.context.current import get_replica_context
from replicax._src.functions.tape import GradientTape
from replicax._src.state.variable import Variable


class Optimizer:
    """The base class of version 1's optimizers.

    Gradients are added up over the replicas, as in TensorFlow: divide the loss by the global batch
    size. Gradients of embeddings are dense here, so that slots of rows outside of the batch decay
    too; TensorFlow's `MomentumOptimizer` and `RMSPropOptimizer` leave such rows as they are.

    Args:
        use_locking: Ignored: updates never overlap.
        name: The name of the optimizer.
        use_own_namescope_for_non_slot_vars: Ignored: there are no name scopes.

    Example:
        >>> issubclass(rx.compat.v1.train.AdamOptimizer, rx.compat.v1.train.Optimizer)
        True
    """

    GATE_NONE, GATE_OP, GATE_GRAPH = 0, 1, 2

    def __init__(
        self, use_locking: bool, name: str, use_own_namescope_for_non_slot_vars: bool = False
    ) -> None:
        if not name:
            raise ValueError("Must specify the optimizer name")
        self._name = name
        self._trained: list[Any] = []  # the variables, in the order of their slots
        self._slots: dict[str, list[Any]] = {}

    def get_name(self) -> str:
        """Return the name of the optimizer."""
        return self._name

    def minimize(
        self,
        loss: Any,
        global_step: Any = None,
        var_list: Any = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: Any = None,
    ) -> None:
        """Compute the gradients of a loss function, and apply them.

        Args:
            loss: A function without arguments that returns the loss.
            global_step: A variable to increase by 1.
            var_list: The variables; by default those that ``loss`` reads.
            gate_gradients: Ignored.
            aggregation_method: Ignored.
            colocate_gradients_with_ops: Ignored.
            name: Ignored.
            grad_loss: The gradient of the loss itself.
        """
        pairs = self.compute_gradients(loss, var_list, grad_loss=grad_loss)
        self.apply_gradients(pairs, global_step)

    def compute_gradients(
        self,
        loss: Any,
        var_list: Any = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Any = None,
    ) -> list[tuple[Any, Any]]:
        """Return the gradient of a loss function for each variable, with the variable."""
        if not callable(loss):
            raise RuntimeError(
                "`loss` is an array, and there is no graph to find its variables in. Pass a"
                " function that returns the loss, or use `rx.GradientTape` and `apply_gradients`."
            )
        with GradientTape() as tape:
            if var_list is not None:
                var_list = [var_list] if isinstance(var_list, Variable) else list(var_list)
                tape.watch(var_list)
            value = loss()
        variables = list(tape.watched_variables()) if var_list is None else var_list
        gradients = tape.gradient(value, variables, output_gradients=grad_loss)
        return list(zip(gradients, variables, strict=True))

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
    ) -> None:
        """Update variables by their gradients, added up over the replicas.

        Args:
            grads_and_vars: Pairs of a gradient and its variable.
            global_step: A variable to increase by 1.
            name: Ignored.
            skip_gradients_aggregation: Whether the gradients are added up already.

        Raises:
            ValueError: If there is no gradient.
            RuntimeError: Outside of the function given to `strategy.run`, in a scope.
        """
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars]
        if not any(gradient is not None for gradient, _ in pairs):
            names = [getattr(variable, "name", variable) for _, variable in pairs]
            raise ValueError(f"No gradients provided for any variable: {names}.")
        replica = get_replica_context()
        if replica is None:
            raise RuntimeError(
                "apply_gradients updates variables on each replica: call it in the function that"
                " you pass to `strategy.run`."
            )
        gradients = [gradient for gradient, _ in pairs if gradient is not None]
        variables = [variable for gradient, variable in pairs if gradient is not None]

        def merge(strategy: Any, gradients: Sequence[Any]) -> None:
            pairs = list(zip(gradients, variables, strict=True))
            if not skip_gradients_aggregation:
                gradients = strategy.extended.batch_reduce_to(ReduceOp.SUM, pairs)
            self._apply(strategy.extended, gradients, variables, global_step)

        replica.merge_call(merge, args=(gradients,))

    def _apply(
        self, extended: Any, totals: Sequence[Any], variables: Sequence[Any], global_step: Any
    ) -> None:
        slots = [self._slots_of(extended, variable) for variable in variables]
        shared = self._shared(extended, variables)
        for total, variable, own in zip(totals, variables, slots, strict=True):
            extended.update(variable, self._update, args=(total, *own, *shared))
        self._finish(extended)
        if global_step is not None:
            extended.update(global_step, lambda step: step.assign_add(1))

    def _slots_of(self, extended: Any, variable: Any) -> list[Any]:
        """Return the slots of a variable; create them the first time."""
        index = next((i for i, v in enumerate(self._trained) if v is variable), None)
        if index is None:
            index = len(self._trained)
            self._trained.append(variable)
            for name, start in self._slot_values().items():
                value = jnp.full(variable.shape, start, variable.dtype)
                label = f"{getattr(variable, 'name', 'variable')}/{self._name}/{name}".replace(
                    ":0", ""
                )
                slot = _colocated(extended, variable, value, label)
                self._slots.setdefault(name, []).append(slot)
        return [self._slots[name][index] for name in self._slot_values()]

    def get_slot_names(self) -> list[str]:
        """Return the names of the slots that exist."""
        return sorted(self._slots)

    def get_slot(self, var: Any, name: str) -> Any:
        """Return the slot of a variable; None if there is none."""
        index = next((i for i, v in enumerate(self._trained) if v is var), None)
        return None if index is None or name not in self._slots else self._slots[name][index]

    def variables(self) -> list[Any]:
        """Return the variables that hold the state of the optimizer."""
        return [slot for name in self.get_slot_names() for slot in self._slots[name]]

    # For each optimizer.

    def _slot_values(self) -> dict[str, float]:
        """Return the names of the slots, with their first values."""
        return {}

    def _shared(self, extended: Any, variables: Sequence[Any]) -> tuple[Any, ...]:
        """Return the variables that all updates read."""
        return ()

    def _update(self, variable: Any, gradient: Any, *slots: Any) -> None:
        """Update a copy of a variable and of its slots."""
        raise NotImplementedError(type(self).__name__)

    def _finish(self, extended: Any) -> None:
        """Update the state of the optimizer after all variables."""


def _colocated(extended: Any, variable: Any, value: Any, name: str) -> Any:
    """Create a variable in the scope of the strategy of another one."""
    if extended.variable_created_in_scope(variable):
        with extended.colocate_vars_with(variable):
            return Variable(value, trainable=False, name=name)
    return Variable(value, trainable=False, name=name)


def _value(parameter: Any, like: Any) -> Any:
    """Return a hyperparameter, called if it is a function, in the dtype of an array."""
    return jnp.asarray(parameter() if callable(parameter) else parameter, like.dtype)


class GradientDescentOptimizer(Optimizer):
    """Subtract the gradient times the learning rate.

    Example:
        >>> w = rx.Variable(1.0)
        >>> rx.compat.v1.train.GradientDescentOptimizer(0.5).minimize(lambda: w * w)
        >>> float(w)
        0.0
    """

    def __init__(
        self, learning_rate: Any, use_locking: bool = False, name: str = "GradientDescent"
    ) -> None:
        super().__init__(use_locking, name)
        self._learning_rate = learning_rate

    def _update(self, variable: Any, gradient: Any, *slots: Any) -> None:
        variable.assign_sub(_value(self._learning_rate, gradient) * gradient)


class MomentumOptimizer(Optimizer):
    """Subtract a decaying sum of gradients times the learning rate.

    Example:
        >>> w = rx.Variable(1.0)
        >>> rx.compat.v1.train.MomentumOptimizer(0.25, 0.9).minimize(lambda: w * w)
        >>> float(w)
        0.5
    """

    def __init__(
        self,
        learning_rate: Any,
        momentum: Any,
        use_locking: bool = False,
        name: str = "Momentum",
        use_nesterov: bool = False,
    ) -> None:
        super().__init__(use_locking, name)
        self._learning_rate = learning_rate
        self._momentum = momentum
        self._use_nesterov = use_nesterov

    def _slot_values(self) -> dict[str, float]:
        return {"momentum": 0.0}

    def _update(self, variable: Any, gradient: Any, *slots: Any) -> None:
        [slot] = slots
        rate, momentum = _value(self._learning_rate, gradient), _value(self._momentum, gradient)
        total = slot * momentum + gradient
        slot.assign(total)
        step = gradient + total * momentum if self._use_nesterov else total
        variable.assign_sub(rate * step)


class AdamOptimizer(Optimizer):
    """Adam, in the form with a corrected learning rate ("epsilon hat" of the paper).

    Example:
        >>> w = rx.Variable(1.0)
        >>> rx.compat.v1.train.AdamOptimizer(0.5).minimize(lambda: w * w)
        >>> round(float(w), 4)
        0.5
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: Any = 0.9,
        beta2: Any = 0.999,
        epsilon: Any = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
        use_own_namescope_for_non_slot_vars: bool = False,
    ) -> None:
        super().__init__(use_locking, name)
        self._learning_rate, self._epsilon = learning_rate, epsilon
        self._betas = beta1, beta2
        self._powers: list[Any] = []

    def _slot_values(self) -> dict[str, float]:
        return {"m": 0.0, "v": 0.0}

    def _shared(self, extended: Any, variables: Sequence[Any]) -> tuple[Any, ...]:
        if not self._powers:
            first = variables[0]
            for number, beta in enumerate(self._betas, 1):
                value, name = _value(beta, first), f"{self._name}/beta{number}_power"
                self._powers.append(_colocated(extended, first, value, name))
        return tuple(self._powers)

    def _update(self, variable: Any, gradient: Any, *slots: Any) -> None:
        m, v, power1, power2 = slots
        rate, epsilon = _value(self._learning_rate, gradient), _value(self._epsilon, gradient)
        beta1, beta2 = (_value(beta, gradient) for beta in self._betas)
        rate = rate * jnp.sqrt(1 - power2.read_value()) / (1 - power1.read_value())
        mean = m + (gradient - m) * (1 - beta1)
        square = v + (jnp.square(gradient) - v) * (1 - beta2)
        m.assign(mean)
        v.assign(square)
        variable.assign_sub(mean * rate / (jnp.sqrt(square) + epsilon))

    def _finish(self, extended: Any) -> None:
        for power, beta in zip(self._powers, self._betas, strict=True):
            extended.update(power, lambda p, beta=beta: p.assign(p * _value(beta, p)))

    def variables(self) -> list[Any]:
        """Return the variables that hold the state of the optimizer."""
        return [*self._powers, *super().variables()]


class AdagradOptimizer(Optimizer):
    """Divide gradients by the root of the sum of their squares.

    Example:
        >>> w = rx.Variable(1.0)
        >>> rx.compat.v1.train.AdagradOptimizer(0.5).minimize(lambda: w * w)
        >>> round(float(w), 4)
        0.5061
    """

    def __init__(
        self,
        learning_rate: Any,
        initial_accumulator_value: float = 0.1,
        use_locking: bool = False,
        name: str = "Adagrad",
    ) -> None:
        if initial_accumulator_value <= 0.0:
            raise ValueError(
                f"initial_accumulator_value must be positive: {initial_accumulator_value}"
            )
        super().__init__(use_locking, name)
        self._learning_rate = learning_rate
        self._initial_accumulator_value = initial_accumulator_value

    def _slot_values(self) -> dict[str, float]:
        return {"accumulator": self._initial_accumulator_value}

    def _update(self, variable: Any, gradient: Any, *slots: Any) -> None:
        [slot] = slots
        total = slot + jnp.square(gradient)
        slot.assign(total)
        variable.assign_sub(gradient * _value(self._learning_rate, gradient) / jnp.sqrt(total))


class RMSPropOptimizer(Optimizer):
    """Divide gradients by the root of a moving average of their squares, which starts at 1.

    Example:
        >>> w = rx.Variable(1.0)
        >>> rx.compat.v1.train.RMSPropOptimizer(0.5).minimize(lambda: w * w)
        >>> round(float(w), 4)
        0.1229
    """

    def __init__(
        self,
        learning_rate: Any,
        decay: Any = 0.9,
        momentum: Any = 0.0,
        epsilon: Any = 1e-10,
        use_locking: bool = False,
        centered: bool = False,
        name: str = "RMSProp",
    ) -> None:
        super().__init__(use_locking, name)
        self._learning_rate, self._decay = learning_rate, decay
        self._momentum, self._epsilon, self._centered = momentum, epsilon, centered

    def _slot_values(self) -> dict[str, float]:
        centered = {"mg": 0.0} if self._centered else {}
        return {"rms": 1.0, "momentum": 0.0, **centered}

    def _update(self, variable: Any, gradient: Any, *slots: Any) -> None:
        square, momentum, *means = slots
        rest = 1 - _value(self._decay, gradient)
        average = square + (jnp.square(gradient) - square) * rest
        square.assign(average)
        for mean in means:
            centre = mean + (gradient - mean) * rest
            mean.assign(centre)
            average = average - jnp.square(centre)
        scale = _value(self._learning_rate, gradient) / jnp.sqrt(
            average + _value(self._epsilon, gradient)
        )
        step = momentum * _value(self._momentum, gradient) + gradient * scale
        momentum.assign(step)
        variable.assign_sub(step)


class FtrlOptimizer(Optimizer):
    """Follow the regularized leader.

    Example:
        >>> w = rx.Variable(1.0)
        >>> rx.compat.v1.train.FtrlOptimizer(0.5).minimize(lambda: w * w)
        >>> round(float(w), 4)
        0.35
    """

    def __init__(
        self,
        learning_rate: Any,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "Ftrl",
        accum_name: str | None = None,
        linear_name: str | None = None,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float | None = None,
    ) -> None:
        super().__init__(use_locking, name)
        self._learning_rate = learning_rate
        self._power = -learning_rate_power
        self._initial_accumulator_value = initial_accumulator_value
        self._l1, self._l2 = l1_regularization_strength, l2_regularization_strength
        self._shrinkage = l2_shrinkage_regularization_strength
        self._beta = beta or 0.0

    def _slot_values(self) -> dict[str, float]:
        return {"accum": self._initial_accumulator_value, "linear": 0.0}

    def _update(self, variable: Any, gradient: Any, *slots: Any) -> None:
        accumulator, linear = slots
        rate = _value(self._learning_rate, gradient)
        weight, old = variable.read_value(), accumulator.read_value()
        total = old + jnp.square(gradient)
        shrunk = gradient + 2 * self._shrinkage * weight
        sigma = (total**self._power - old**self._power) / rate
        line = linear + shrunk - sigma * weight
        l2 = self._l2 + self._beta / (2 * rate)
        quadratic = total**self._power / rate + 2 * l2
        accumulator.assign(total)
        linear.assign(line)
        chosen = (jnp.sign(line) * self._l1 - line) / quadratic
        variable.assign(jnp.where(jnp.abs(line) > self._l1, chosen, 0.0))
