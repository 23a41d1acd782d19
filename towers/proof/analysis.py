"""The analysis: the state of each tensor of a forward pass, from its inputs to its results.

A forward pass of a static batch is analysed up to three times: `static_batch` says why.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph import graph_walk
from towers.graph.graph_walk import leaves_of, names_of, operation_of
from towers.graph.variable_access import Writes
from towers.proof.fixed_point import Settled, settle
from towers.proof.loops_of_size import loops_of_size
from towers.proof.scratch import ForwardPass, Scratch, make_scratch, make_whole_scratch
from towers.proof.stand_ins import SizeConstants, have_one_size, states_of_inputs, static_size
from towers.proof.states import (
    HAS_OWN_SIZE,
    INDEPENDENT,
    OTHER_DIMENSIONS,
    TAKES_NO_OTHER_BATCH,
    TAKES_SOME,
    Kind,
    Reason,
    State,
    unknown,
)
from towers.proof.static_batch import divisors_of_values, find_size_constants
from towers.proof.view import View
from towers.proof.written import Written, written_by, written_otherwise
from towers.proof.written_before import ProgramOrder, order_of_program


class Analysis(typing.NamedTuple):
    """Where the examples are in each tensor of a forward pass."""
    # {name of a tensor: its state}
    states: typing.Dict[str, State]
    # {name of a statistic of the shard: its first use that is not linear}
    reasons: typing.Dict[str, Reason]
    # names of the operations that were analysed, in the order of the forward pass
    operations: typing.List[str]
    # names of the operations that draw random numbers, also in the bodies of functions
    random: typing.List[str]
    # {name of an operation: the variables that it writes, and the values}
    writes: typing.Dict[str, typing.List[Written]]
    # names of the statistics that are means over examples, or over rows of them
    means: typing.FrozenSet[str]
    # names of all operations of the forward pass, analysed or not
    forward_pass: typing.FrozenSet[str]
    # names of placeholders of no known shape, which are taken for scalars
    assumed_scalars: typing.List[str]
    # {name of an operation: the sentence that a proof supposes of it}; a state that depends on the
    # supposition is marked with this name
    suppositions: typing.Dict[str, str]
    # where the graph takes no batch of another size, the analysis for the size that it has: it
    # tells where the examples are in this graph, and nothing of a graph for another batch
    as_built: typing.Optional['Analysis'] = None
    # of a static batch, the analysis with some constants taken for multiples of its size
    with_size_constants: typing.Optional['Analysis'] = None
    # the constants that this analysis takes for multiples of the batch's size
    size_constants: typing.Optional[SizeConstants] = None
    # names of divisors of sums: any of them may be the batch's size, so that none is taken for it
    other_divisors: typing.Sequence[str] = ()
    # of a static batch, names of the divisors of values of the examples that may be computed from
    # its size: see `divisors_of_values`
    divisors_of_values: typing.Sequence[str] = ()
    # {name of a loop's operation: the constant that ends the loop, which may be the batch's size}
    loops_of_size: typing.Mapping[str, Reason] = {}

    @property
    def analysed(self) -> typing.Set[str]:
        """The names of the operations that were analysed."""
        return set(self.operations)

    def in_order(self, names: typing.Iterable[str]) -> typing.List[str]:
        """Names of operations in the order of the forward pass; operations in functions are
        last."""
        places = {name: place for place, name in enumerate(self.operations)}
        return sorted(names, key=lambda name: (places.get(name, len(places)), name))

    def is_mean(self, op: tf.Operation) -> bool:
        """Whether an operation is a mean over the examples, or over rows of them."""
        return op.name in self.means

    def state(self, tensor: tf.Tensor) -> State:
        """The state of a tensor; a tensor from outside of the forward pass is the same on every
        tower."""
        if tensor.name not in self.states and tensor.op.name in self.forward_pass:
            return unknown(tensor.op, 'was not looked at')
        return self.states.get(tensor.name, INDEPENDENT)


NO_ANALYSIS = Analysis(
    states={}, reasons={}, operations=[], random=[], writes={}, means=frozenset(),
    forward_pass=frozenset(), assumed_scalars=[], suppositions={})
"""The analysis of nothing, where one tower has the whole batch."""


def analyse(operations: list, inputs: typing.Any, fetches: list) -> Analysis:
    """Tells where the examples are in the tensors that some fetches need.

    Args:
      operations: list of the operations of the recorded forward pass.
      inputs: nest of tensors at which the batch enters, each with the examples along its first
        dimension.
      fetches: list of tensors and operations.

    Returns:
      `Analysis`.
    """
    needed = ForwardPass(_needed(operations, inputs, fetches), inputs)
    forward_pass = _ForwardPass(
        needed, order_of_program(needed.operations), frozenset(names_of(operations)))
    batch_size = static_size(inputs)
    if batch_size is None:
        return forward_pass.analysed_in(make_scratch(needed))
    return _analysed_of_static_batch(forward_pass, batch_size)


def _analysed_of_static_batch(forward_pass: '_ForwardPass', batch_size: int) -> Analysis:
    """The analysis of a forward pass whose batch has a static number of examples: with each
    constant as it is. Its fields have the analyses for the size of that batch, and with size
    constants.

    The search for size constants has to know where the examples are in the graph as it was built.
    Where no operation holds the size of the batch, the examples are in the same places for another
    batch: then the first analysis, for a prime, tells where they are.
    """
    whole_scratch = make_whole_scratch(forward_pass.needed)
    if whole_scratch is None:  # shape inference refuses a batch of another size
        return _analysed_of_only_size(forward_pass, batch_size)
    analysis = forward_pass.analysed_in(whole_scratch)
    of_built_graph = analysis
    if _holds_size(analysis):
        of_built_graph = _analysed_as_built(forward_pass, batch_size)
        analysis = analysis._replace(as_built=of_built_graph)
    with_size_constants = _analysed_with_size_constants(forward_pass, of_built_graph, batch_size)
    return analysis._replace(with_size_constants=with_size_constants)


def _analysed_of_only_size(forward_pass: '_ForwardPass', batch_size: int) -> Analysis:
    """The analysis of a forward pass whose shape inference refuses a batch of another size.

    With each constant as it is, a proof can only end at the operation that refuses another batch.
    So the analysis is made with size constants, if any constant may be taken for the size. If none
    may, each constant stays as it is: then the analysis says where the proof ends.
    """
    as_built = _analysed_as_built(forward_pass, batch_size)
    analysis = _analysed_with_size_constants(forward_pass, as_built, batch_size)
    if analysis is None:
        analysis = forward_pass.analysed_in(make_scratch(forward_pass.needed))
    return analysis._replace(as_built=as_built)


def _analysed_as_built(forward_pass: '_ForwardPass', batch_size: int) -> Analysis:
    """The analysis for the number of examples that the program was built with."""
    return forward_pass.analysed_in(make_scratch(forward_pass.needed, examples=batch_size))


def _analysed_with_size_constants(forward_pass: '_ForwardPass', of_built_graph: Analysis,
                                  batch_size: int) -> typing.Optional[Analysis]:
    """The analysis with some constants taken for multiples of the number of examples; None where no
    constant and no divisor may be such a multiple, or the inputs have several static sizes.

    Args:
      forward_pass: `_ForwardPass`.
      of_built_graph: `Analysis` that tells where the examples are in the graph as it was built.
      batch_size: the static number of examples.
    """
    # Of inputs [50, 4] and [25, 4] it is not known which of the two is the number of examples.
    if not have_one_size(forward_pass.needed.inputs):
        return None
    found = find_size_constants(
        forward_pass.needed.operations, of_built_graph.states, batch_size)
    # If there are divisors that could be the size, and are not taken for it, the verdict names
    # them.
    if not found.size_constants and not found.other_divisors:
        return None
    scratch = make_scratch(forward_pass.needed, size_constants=found.size_constants)
    analysis = forward_pass.analysed_in(scratch)
    return analysis._replace(
        size_constants=found.size_constants, other_divisors=found.other_divisors)


class _ForwardPass(typing.NamedTuple):
    """A forward pass that is analysed, once or more."""
    needed: ForwardPass  # it has only the operations that the fetches need
    order: ProgramOrder  # of these operations
    operations: typing.FrozenSet[str]  # names of all operations of the pass

    def analysed_in(self, scratch: Scratch) -> Analysis:
        """The analysis of the pass by its scratch graph."""
        settled = settle(scratch, self.order)
        view = settled.view
        states = dict(view.states)
        # The inputs' placeholders have names of their own in the scratch graph.
        states.update(states_of_inputs(self.needed.inputs))
        # The scratch graph also has the bodies of functions, whose operations the pass lacks.
        names_in_pass = names_of(self.needed.operations)
        names = [op.name for op in settled.operations if op.name in names_in_pass]
        # Operations in the bodies of functions may also draw random numbers.
        random = [op.name for op in settled.operations if graph_walk.is_random(op)]
        batch_size = static_size(self.needed.inputs)
        of_size: typing.Mapping[str, Reason] = {}
        divisors: typing.List[str] = []
        if batch_size is not None:
            of_size = loops_of_size(view, batch_size)
            divisors = divisors_of_values(self.needed.operations, states, batch_size)
        return Analysis(
            states=states, reasons=view.reasons, operations=names, random=random,
            writes=_writes(settled), means=_means(view), forward_pass=self.operations,
            assumed_scalars=scratch.assumed_scalars, suppositions=view.suppositions,
            divisors_of_values=divisors, loops_of_size=of_size)


def _needed(operations: typing.List[tf.Operation], inputs: typing.Any,
            fetches: list) -> typing.List[tf.Operation]:
    """The operations of a forward pass that fetches need, behind the tensors at which the batch
    enters.

    Args:
      operations: list of the operations of the forward pass.
      inputs: nest of the tensors at which the batch enters.
      fetches: list of tensors and operations.
    """
    batch_enters_at = graph_walk.operation_names(leaves_of(inputs))
    forward_pass = names_of(operations)

    def needed_by(op: tf.Operation) -> typing.List[tf.Operation]:
        """The operations that an operation of the forward pass needs; [] where the batch enters."""
        if op.name in batch_enters_at:
            return []
        sources = graph_walk.inputs_of(op) + _conditions(op)
        return graph_walk.with_names(sources, forward_pass)

    found = graph_walk.reached(map(operation_of, fetches), needed_by)
    return [op for op in operations if op.name in found and op.name not in batch_enters_at]


def _conditions(op: tf.Operation) -> typing.List[tf.Operation]:
    """The operations that compute the conditions of the branches that end at a `Merge`; [] for any
    other operation.

    Which value the `Merge` gives depends on these conditions, whatever its inputs are computed
    from.
    """
    if op.type not in ('Merge', 'RefMerge'):
        return []
    conditions = [compat.condition_around(tensor.op) for tensor in op.inputs]
    return [condition.op for condition in conditions if condition is not None]


def _holds_size(analysis: Analysis) -> bool:
    """Whether an operation holds the size of the program's batch: it takes no batch of another
    size, or makes a result of the program's size, as a transposed convolution does whose output
    shape is a constant, or a slice whose end is one."""
    reasons = [state.reason for state in analysis.states.values() if state.reason is not None]
    ends = {reason.why for reason in reasons}
    return not ends.isdisjoint(
        [TAKES_NO_OTHER_BATCH, OTHER_DIMENSIONS, HAS_OWN_SIZE, TAKES_SOME])


def _writes(settled: Settled) -> typing.Dict[str, typing.List[Written]]:
    """{name of an operation of the program: what it writes, itself or in functions it calls}.

    `roles.written_values` judges an operation by its writes in this dict, and has a check of its
    own for an operation that is not in the dict. So an operation of the program that writes
    otherwise than by an assign, an add or a scatter is left out here. Such an operation in the body
    of a function is not left out: else the call of the function would be judged by its other writes
    alone. A call in a function writes nothing but what the operations of its own body write.
    """
    view = settled.view
    bodies = view.bodies
    finder = Writes(view.graph)
    found: typing.Dict[str, typing.List[Written]] = collections.defaultdict(list)
    for op in settled.operations:
        name_in_program = bodies.outermost_call(op.name)
        written = written_by(op, view)
        if written is not None:
            found[name_in_program].append(written)
        elif bodies.is_in_body(op.name) and not bodies.has_body_of(op.name):
            found[name_in_program] += written_otherwise(op, view, finder)
    return {name: writes for name, writes in found.items() if writes}


def _means(view: View) -> typing.FrozenSet[str]:
    """The names of the operations that take means over examples, or over rows of them.

    A mean over rows, of which examples have different numbers, has no state of the kind MEAN: it is
    a statistic of the shard, for which the view has the reason why a proof ends there.
    """
    found: typing.Set[str] = set()
    for state in view.states.values():
        if state.kind is Kind.MEAN:
            found |= state.reductions
    for name in view.reasons:
        if view.graph.get_operation_by_name(name).type == 'Mean':
            found.add(name)
    return frozenset(found)
