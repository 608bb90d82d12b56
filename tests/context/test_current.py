import threading

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicax as rx
from replicax._src.context.current import Attributes
from replicax._src.state import hooks
from tests.replicas import mirrored

D = rx.distribute
ScopeError = rx.errors.ScopeError


@pytest.fixture
def strategy():
    return mirrored(2)


@pytest.fixture
def one():
    return D.OneDeviceStrategy("CPU:1")


def surroundings():
    return D.has_strategy(), D.in_cross_replica_context(), D.get_replica_context() is None


def test_outside_of_every_scope_the_default_strategy_is_in_replica_context():
    default = D.get_strategy()

    assert surroundings() == (False, False, False)
    assert default.num_replicas_in_sync == 1
    assert D.get_replica_context().replica_id_in_sync_group == 0
    assert D.get_replica_context().strategy is default


@pytest.mark.parametrize("make", [lambda: mirrored(2), lambda: D.OneDeviceStrategy("CPU:0")])
def test_a_scope_makes_its_strategy_current_and_restores(make):
    strategy = make()

    with strategy.scope() as given:
        assert given is strategy
        assert D.get_strategy() is strategy
        assert surroundings() == (True, True, True)

    assert surroundings() == (False, False, False)


def test_a_scope_is_left_after_an_exception(strategy):
    with pytest.raises(KeyError), strategy.scope():
        raise KeyError("stop")

    assert surroundings() == (False, False, False)


def test_the_same_strategy_nests(strategy):
    with strategy.scope():
        with strategy.scope():
            assert D.get_strategy() is strategy
        assert D.get_strategy() is strategy


def test_a_scope_object_is_used_again_after_it_ended(strategy):
    for _ in range(2):
        with strategy.scope():
            assert D.has_strategy()
        assert not D.has_strategy()


def test_another_strategy_does_not_nest_and_both_are_named(strategy, one):
    with (
        strategy.scope(),
        pytest.raises(ScopeError, match="MirroredStrategy of 2 replicas") as e,
        one.scope(),
    ):
        pass

    assert "OneDeviceStrategy" in str(e.value)
    assert isinstance(e.value, RuntimeError)
    assert surroundings() == (False, False, False)


def test_an_equal_strategy_is_another_one(strategy):
    with strategy.scope(), pytest.raises(ScopeError, match="Leave that scope first"):
        mirrored(2).scope().__enter__()


def test_the_default_strategys_scope_changes_nothing_and_others_nest_in_it(strategy):
    default = D.get_strategy()

    with default.scope() as given:
        assert given is default
        assert surroundings() == (False, False, False)
        with default.scope(), strategy.scope():
            assert surroundings() == (True, True, True)


def test_the_default_strategys_scope_does_not_open_inside_another(strategy):
    default = D.get_strategy()

    with strategy.scope(), pytest.raises(ScopeError, match="the default strategy"):
        default.scope().__enter__()


def test_a_scope_belongs_to_its_thread(strategy):
    seen = []
    with strategy.scope():
        thread = threading.Thread(target=lambda: seen.append(surroundings()))
        thread.start()
        thread.join()

    assert seen == [(False, False, False)]


def test_two_threads_have_two_strategies(strategy, one):
    gate, seen = threading.Barrier(2, timeout=20), {}

    def work(s):
        with s.scope():
            gate.wait()
            seen[s] = D.get_strategy()
            gate.wait()

    threads = [threading.Thread(target=work, args=(s,)) for s in (strategy, one)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert seen == {strategy: strategy, one: one}


def test_inside_a_replica_the_context_is_its_own(strategy):
    def step():
        assert surroundings() == (True, False, False)
        assert D.get_strategy() is strategy
        assert D.get_replica_context().strategy is strategy
        return D.get_replica_context().replica_id_in_sync_group

    result = strategy.run(step)

    assert [int(v) for v in result.values] == [0, 1]
    assert surroundings() == (False, False, False)


@pytest.mark.parametrize("compile_it", [False, True])
def test_inside_merge_call_the_context_is_cross_replica(strategy, compile_it):
    seen = []

    def merged(given):
        seen.append((given is strategy, *surroundings()))

    run = lambda: strategy.run(lambda: D.get_replica_context().merge_call(merged))  # noqa: E731
    (rx.function(run) if compile_it else run)()

    assert seen == [(True, True, True, True)]


def test_a_scope_does_not_open_inside_a_replica(strategy, one):
    for other in (strategy, one):
        with pytest.raises(ScopeError, match="Enter the scope outside"):
            strategy.run(lambda o=other: o.scope().__enter__())


VERBS = {
    "run": lambda s: s.run(lambda: 1),
    "reduce": lambda s: s.reduce("SUM", jnp.ones(()), axis=None),
    "gather": lambda s: s.gather(jnp.ones(1), axis=0),
    "experimental_distribute_values_from_function": lambda s: (
        s.experimental_distribute_values_from_function(lambda c: 1)
    ),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("compile_it", [False, True])
def test_cross_replica_verbs_are_refused_inside_a_replica(strategy, verb, compile_it):
    run = lambda: strategy.run(lambda: VERBS[verb](strategy))  # noqa: E731

    with pytest.raises(ScopeError, match="cross-replica context") as error:
        (rx.function(run) if compile_it else run)()

    assert f"`strategy.{verb}`" in str(error.value)
    assert "get_replica_context()" in str(error.value)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("outer", ["mirrored", "one device"])
def test_a_verb_of_another_strategy_is_refused_inside_a_scope(strategy, one, verb, outer):
    outside, inside = (strategy, one) if outer == "mirrored" else (one, strategy)

    with outside.scope(), pytest.raises(ScopeError, match="Leave that scope first"):
        VERBS[verb](inside)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_of_another_strategy_is_refused_inside_a_replica(strategy, one, verb):
    with pytest.raises(ScopeError):
        strategy.run(lambda: VERBS[verb](one))


@pytest.mark.parametrize("verb", ["run", "reduce"])
def test_verbs_of_one_device_are_refused_inside_its_replica(one, verb):
    with pytest.raises(ScopeError, match="OneDeviceStrategy of 1 replica"):
        one.run(lambda: VERBS[verb](one))


def test_a_run_of_the_default_strategy_does_not_nest_but_holds_others(strategy):
    default = D.get_strategy()

    assert default.run(lambda: strategy.run(lambda: 1)) == 1
    with pytest.raises(ScopeError, match="the default strategy"):
        default.run(lambda: default.run(lambda: 1))
    with pytest.raises(ScopeError):
        strategy.run(lambda: default.run(lambda: 1))


class TestSetStrategy:
    """A strategy for the rest of the program."""

    @pytest.fixture(autouse=True)
    def _unset(self):
        yield
        D.experimental_set_strategy(None)

    def test_it_is_current_in_cross_replica_context_until_it_is_cleared(self, strategy):
        D.experimental_set_strategy(strategy)

        assert D.get_strategy() is strategy
        assert surroundings() == (True, True, True)
        assert len(rx.Variable(1.0).components) == 2
        with strategy.scope():
            assert D.get_strategy() is strategy
        assert [
            int(i)
            for i in strategy.run(lambda: D.get_replica_context().replica_id_in_sync_group).values
        ] == [0, 1]

        D.experimental_set_strategy(None)
        assert surroundings() == (False, False, False)

    def test_it_may_be_replaced_by_another_or_by_the_default(self, strategy, one):
        default = D.get_strategy()
        D.experimental_set_strategy(strategy)
        D.experimental_set_strategy(one)
        assert D.get_strategy() is one

        D.experimental_set_strategy(default)
        assert not D.has_strategy()

    def test_it_is_refused_inside_a_scope_or_a_replica(self, strategy, one):
        with strategy.scope(), pytest.raises(ScopeError, match="Call it outside of every"):
            D.experimental_set_strategy(one)
        with pytest.raises(ScopeError):
            strategy.run(lambda: D.experimental_set_strategy(one))

        assert not D.has_strategy()

    def test_what_is_not_a_strategy_is_refused(self):
        with pytest.raises(TypeError, match="needs a strategy, or None"):
            D.experimental_set_strategy("mirrored")


def test_one_scope_may_be_entered_again_and_inside_itself(two):
    scope = two.scope()
    for _ in range(2):
        with scope as outer, scope as inner:
            assert outer is inner is rx.distribute.get_strategy() is two
        assert not rx.distribute.has_strategy()

    with pytest.raises(KeyError), scope, scope:
        raise KeyError
    assert not rx.distribute.has_strategy()


def test_one_scope_may_be_entered_by_several_threads(two):
    scope, seen = two.scope(), []

    def other():
        with scope:
            seen.append(rx.distribute.get_strategy() is two)
        seen.append(rx.distribute.has_strategy())

    with scope:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        seen.append(rx.distribute.get_strategy() is two)

    assert seen == [True, False, True]
    assert not rx.distribute.has_strategy()


def test_a_scope_is_a_decorator(two):
    @two.scope()
    def make():
        return rx.Variable(1.0)

    assert len(make().components) == len(make().components) == 2


class Owner:
    pass


ZERO = 0
CHANGES = st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.sampled_from([ZERO, 1, True, "x"]))


@given(st.lists(CHANGES, max_size=30))
def test_plain_attributes_have_one_number_for_each_state(changes):
    attributes, owners = Attributes(), [Owner() for _ in range(4)]
    state = {}
    numbers = {(): attributes.number()}
    for who, name, value in changes:
        attributes.note(owners[who], name, state.get((who, name), ZERO), value)
        state[who, name] = value
        told = [f"{place} {v!r}" for place, v in state.items() if v is not ZERO]
        now = tuple(sorted(told))
        assert numbers.setdefault(now, attributes.number()) == attributes.number()
    assert len(set(numbers.values())) == len(numbers)


def test_objects_that_are_gone_change_no_number_and_are_forgotten():
    attributes, stays = Attributes(), Owner()
    attributes.note(stays, "a", 0, 1)
    number = attributes.number()
    for _ in range(1000):
        attributes.note(passing := Owner(), "a", 0, 1)
        attributes.number()
        attributes.note(passing, "a", 1, 0)
        assert attributes.number() == number

    assert len(attributes._owners) < 200
    attributes.note(stays, "a", 1, 0)
    assert attributes.number() == 0


def test_scopes_of_one_strategy_may_be_left_in_any_order():
    strategy = mirrored(2)
    outer, inner = strategy.scope(), strategy.scope()
    outer.__enter__()
    inner.__enter__()

    outer.__exit__(None, None, None)
    assert rx.distribute.get_strategy() is strategy
    inner.__exit__(None, None, None)

    assert not rx.distribute.has_strategy()


def test_a_scope_that_is_not_open_cannot_be_left():
    one, other = mirrored(2), mirrored(2)

    with pytest.raises(rx.errors.ScopeError, match="none is open"):
        one.scope().__exit__(None, None, None)
    with one.scope():
        with pytest.raises(rx.errors.ScopeError, match="reverse order"):
            other.scope().__exit__(None, None, None)
        assert rx.distribute.get_strategy() is one

    assert not rx.distribute.has_strategy()


def plain_creator(next_creator, **kwargs):
    return next_creator(**kwargs)


@given(st.lists(st.sampled_from(["scope", "creator"]), min_size=1, max_size=4))
def test_scopes_and_creator_scopes_are_left_in_reverse_order(kinds):
    strategy = mirrored(2)
    blocks = []
    for kind in kinds:
        is_scope = kind == "scope"
        block = strategy.scope() if is_scope else rx.variable_creator_scope(plain_creator)
        block.__enter__()
        blocks.append((kind, block))

    for block in [b for k, b in blocks[:-1] if "creator" in (k, kinds[-1])]:
        with pytest.raises(rx.errors.ScopeError, match="reverse order"):
            block.__exit__(None, None, None)
    for _, block in reversed(blocks):
        block.__exit__(None, None, None)

    assert not rx.distribute.has_strategy()
    assert not hooks._creators.get()


def test_an_error_closes_inner_scopes_that_a_signal_kept_open():
    def interrupted():
        with mirrored(2).scope():
            rx.variable_creator_scope(plain_creator).__enter__()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not rx.distribute.has_strategy()
    assert not hooks._creators.get()
    with mirrored(2).scope():
        pass
