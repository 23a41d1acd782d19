"""What the rules ask of the analysis: the `View` of the scratch graph.

A rule gets an operation of the scratch graph, the states of its inputs, and the view. It asks the
view for ranks, shapes and static values, and notes there why a statistic of the shard ends a proof.

A shape that is not static in the scratch graph may be static in the program's graph: in loops
`set_shape` has told TensorFlow shapes that an import does not keep.
"""

import itertools
import typing

import numpy as np
import tensorflow.compat.v1 as tf

from towers import compat
from towers.graph import graph_walk
from towers.graph.variable_access import read_from
from towers.proof.functions import Bodies
from towers.proof.scratch import Scratch
from towers.proof.stand_ins import LEAST_FROM_STAND_IN, primes_from
from towers.proof.states import Kind, Reason, State

_SAME_SHAPE_IN_PROGRAM = (Kind.INDEPENDENT, Kind.PER_EXAMPLE, Kind.MEAN, Kind.SUM)
"""Kinds of tensors whose dimensions, but for the dimension of the examples, have the lengths that
they have in the program: a function of one example gives the same shape in any batch."""

_KEEPS_SHAPE = frozenset('Identity Cast StopGradient Relu Tanh Sigmoid Neg'.split())
_FILL_TABLES = (
    'InitializeTable', 'LookupTableImport', 'LookupTableInsert', 'LookupTableRemove')
"""The types of the operations that change the entries of a table begin like this."""

_NO_STATE_YET = State(Kind.UNKNOWN)
_LARGEST_LENGTH = 2 ** 31  # no dimension is longer


class View:
    """The states of the tensors of a scratch graph as far as they are known, and what is static.

    Attributes:
      graph: `tf.Graph`, the scratch graph.
      bodies: `Bodies` of the functions that are called in it.
      examples: the number of examples in it: int.
      is_as_built: whether `examples` is the static size of the program's own batch, and not a
        prime: then states tell where the examples are in this graph, and nothing of another batch.
      fills_tables: whether the forward pass fills a table; else tables are the same in all steps.
      has_stand_ins: whether primes stand for lengths of inputs, beside the number of examples.
      reads_of_written: names of the reads that get what the forward pass has written before.
      with_own_gradient: names of the operations to which the program gave a gradient of its own.
      states: {name of a tensor: `State`}, which `fixed_point` fills.
      reasons: {name of a statistic of the shard: `Reason`, its first use that is not linear}.
      suppositions: {name of an operation: a sentence that a proof supposes of it}.
      arrays: `Arrays`, the states of the elements of `tf.TensorArray`s.
    """

    def __init__(self, scratch: Scratch, bodies: Bodies, program: typing.Dict[str, tf.Operation],
                 reads_of_written: typing.Container[str] = ()):
        """Begins with the states of the tensors at which the forward pass begins.

        Args:
          scratch: `Scratch`.
          bodies: `Bodies` of its functions.
          program: {name: operation of the program} that the scratch graph has once more.
          reads_of_written: names of the reads that get what the forward pass has written before.
        """
        self.graph = scratch.graph
        self.bodies = bodies
        self.reads_of_written = reads_of_written
        self.with_own_gradient = scratch.with_own_gradient
        self.examples = scratch.examples
        self.is_as_built = not scratch.is_prime
        self.has_stand_ins = scratch.has_stand_ins
        self.states = dict(scratch.initial_states)
        self.reasons: typing.Dict[str, Reason] = {}
        self.suppositions: typing.Dict[str, str] = {}
        self.arrays = Arrays()
        self._program = program
        self._has_static_batch = scratch.has_static_batch
        self._variables_read = scratch.variables_read
        operations = scratch.graph.get_operations()
        self._operation_names = graph_walk.names_of(operations)
        self.fills_tables = any(op.type.startswith(_FILL_TABLES) for op in operations)
        self._merges = _merges_by_frame(scratch.graph)
        # {(name of a tensor, dimension): the prime in the place of its length}
        self._stand_ins: typing.Dict[typing.Tuple[str, int], int] = {}
        self._large_primes = primes_from(_LARGEST_LENGTH)
        # {name of a tensor: its value, None if that is not static}, of those asked for
        self._static_values: typing.Dict[str, typing.Optional[np.ndarray]] = {}
        # {type of an operation: whether it is stateful}, of those asked for
        self._is_stateful: typing.Dict[str, bool] = {}
        # what `remembered` has computed
        self._results: typing.Dict[tuple, typing.Any] = {}

    # ---- a tensor

    def state(self, tensor: tf.Tensor) -> State:
        """The state of a tensor."""
        return self.states[tensor.name]

    def state_or_none(self, tensor: tf.Tensor) -> typing.Optional[State]:
        """The state of a tensor; None where it has none yet, as at the beginning of a loop."""
        return self.states.get(tensor.name)

    def state_so_far(self, tensor: tf.Tensor) -> State:
        """The state of a tensor; UNKNOWN where it has none yet, as in the first round of the
        analysis a tensor of a loop."""
        return self.states.get(tensor.name, _NO_STATE_YET)

    def rank(self, tensor: tf.Tensor) -> typing.Optional[int]:
        """The number of dimensions; None where it is not static."""
        if tensor.shape.ndims is not None:
            return tensor.shape.ndims
        # In a loop the rank may be static in the program, and not in the import.
        original = self._original(tensor)
        return None if original is None else original.shape.ndims

    def shape_by_inference(self, tensor: tf.Tensor) -> typing.Optional[list]:
        """The shape that TensorFlow infers, without what the tensor's own state tells.

        The rule of `Reshape` asks for the shape of its result, to compute the result's state. From
        the second round on the result has a state: the rule's own answer, which would prove itself
        if it were part of the shape. For any other tensor `shape` tells more.

        Returns:
          List of int or None; None where the rank is not static.
        """
        rank = self.rank(tensor)
        if rank is None:
            return None
        lengths: typing.List[typing.Optional[int]] = [None] * rank
        if tensor.shape.ndims is not None:
            lengths = tensor.shape.as_list()
        # A length in the program may be the size of its static batch; here it is a prime.
        if self._has_static_batch:
            return lengths
        return self._with_lengths_of_program(tensor, lengths)

    def _with_lengths_of_program(self, tensor: tf.Tensor, lengths: list) -> list:
        """Completes lengths: each one that is not static is taken from the program's tensor."""
        if None not in lengths:
            return lengths
        original = self._original(tensor)
        if original is None or original.shape.ndims != len(lengths):
            return lengths
        completed = []
        for length, length_in_program in zip(lengths, original.shape.as_list()):
            completed.append(length_in_program if length is None else length)
        return completed

    def shape(self, tensor: tf.Tensor) -> typing.Optional[list]:
        """The lengths of the dimensions in the scratch graph, None where a length is not static:
        the lengths that TensorFlow infers, and where it infers none, what the tensor's state tells.

        Returns:
          List of int or None; None where the rank is not static.
        """
        lengths = self.shape_by_inference(tensor)
        state = self.state_or_none(tensor)
        if lengths is None or None not in lengths or state is None:
            return lengths
        if state.kind in _SAME_SHAPE_IN_PROGRAM:
            lengths = self._with_lengths_of_program(tensor, lengths)
        if state.kind is Kind.PER_EXAMPLE:
            # Of a static batch, `_with_lengths_of_program` may have set the size of that batch.
            lengths[state.axis] = state.entries_of_each * self.examples
        return lengths

    def number_of_static_lengths(self, tensor: tf.Tensor) -> int:
        """How many of the last dimensions of a tensor have lengths that are static in the program.
        In the scratch graph a length may be a prime that stands in, or a number computed from such
        a prime."""
        original = self._original(tensor)
        if original is None or original.shape.ndims is None:
            return 0
        lengths_from_last = reversed(original.shape.as_list())
        static_lengths = itertools.takewhile(_is_static, lengths_from_last)
        return len(list(static_lengths))

    def stand_in(self, tensor: tf.Tensor, axis: int) -> typing.Optional[int]:
        """A prime in the place of a length that is not static, the same one for the same length.

        It is a number of `State.sizes` alone, and larger than any length, so that no other number
        is taken for it. (The primes of `stand_ins.lengths_of` are lengths of tensors in the scratch
        graph.) In a loop a length may differ from iteration to iteration: there the result is None.

        Args:
          tensor: the tensor.
          axis: the dimension with the length.
        """
        source = graph_walk.source_through(tensor, _KEEPS_SHAPE)
        if self.bodies.is_in_body(source.op.name):  # perhaps the body of a loop
            return None
        if self._is_in_loop_v1(source.op.name):
            return None
        key = source.name, axis
        if key not in self._stand_ins:
            self._stand_ins[key] = next(self._large_primes)
        return self._stand_ins[key]

    def value(self, tensor: tf.Tensor) -> typing.Optional[np.ndarray]:
        """The static value of a tensor that is the same on every tower; None for any other tensor,
        since its value in this graph is not its value on a shard.

        Constant sizes have a value even where TensorFlow does not find it to be static.
        """
        state = self.state_or_none(tensor)
        if state is None:
            return None
        if state.kind is Kind.SIZES and not state.depends_on_size:
            return self._value_of_sizes(tensor, state)
        if state.kind is not Kind.INDEPENDENT:
            return None
        if tensor.name not in self._static_values:
            self._static_values[tensor.name] = tf.get_static_value(tensor)
        return self._static_values[tensor.name]

    def entry(self, tensor: tf.Tensor, place: int) -> typing.Optional[np.ndarray]:
        """The static value of one entry of a vector, or of one row of a matrix; None where this
        entry or row is not static.

        The other entries need not be static: entry 0 of `tf.stack([0, length])` is 0. Nor need
        they in a matrix that is joined from rows, or stacked from columns, as `tf.pad` gets it.

        Args:
          tensor: the vector or the matrix.
          place: the place of the entry or the row along dimension 0.
        """
        value = self.value(tensor)
        if value is not None:
            return value[place]
        op = same_numbers_behind(tensor).op
        if op.type == 'Pack' and op.get_attr('axis') == 0:
            return self.value(op.inputs[place])
        if op.type == 'Pack' and op.get_attr('axis') == 1:
            return self._row_of_columns(op, place)
        if op.type == 'ConcatV2':
            return self._entry_of_parts(op, place)
        return None

    def _row_of_columns(self, stack: tf.Operation, place: int) -> typing.Optional[np.ndarray]:
        """The row at a place of a matrix that is stacked from columns; None where a number of the
        row is not static."""
        numbers = [self.entry(column, place) for column in stack.inputs]
        if any(number is None for number in numbers):
            return None
        return np.array(numbers)

    def _entry_of_parts(self, concat: tf.Operation, place: int) -> typing.Optional[np.ndarray]:
        """The entry, or the row, at a place of parts that are joined along dimension 0; None where
        it is not known in which part the place is, or that entry is not static."""
        *parts, axis_of_parts = concat.inputs
        axis = self.value(axis_of_parts)
        if axis is None or axis != 0:
            return None
        for part in parts:
            shape = self.shape(part)
            if shape is None or shape[0] is None:
                return None
            is_for_any_lengths = self.number_of_static_lengths(part) == len(shape)
            if self.has_stand_ins and not is_for_any_lengths:
                return None
            if place < shape[0]:
                return self.entry(part, place)
            place -= shape[0]
        return None

    def _value_of_sizes(self, tensor: tf.Tensor, state: State) -> typing.Optional[np.ndarray]:
        """The numbers of a scalar or a vector of constant sizes; None for a tensor of a higher
        rank, or where a number may have been computed from a prime that stands for a length: in a
        run it is another number."""
        rank = self.rank(tensor)
        if rank is None or rank > 1:
            return None
        numbers = [size.constant for size in state.sizes]
        # The primes of `stand_in` are larger than any length. The primes for lengths of inputs are
        # smaller: where there are any, each large number counts as unknown, even a known one.
        least_unknown = LEAST_FROM_STAND_IN if self.has_stand_ins else _LARGEST_LENGTH
        if max(map(abs, numbers), default=0) >= least_unknown:
            return None
        vector = np.array(numbers, np.int64)
        return vector if rank == 1 else vector[0]

    def variables_read(self, tensor: tf.Tensor) -> typing.List[str]:
        """The names of the variables whose values a tensor consists of."""
        names = self._variables_read.get(tensor.name)  # of a tensor from outside of the pass
        return names or [source.name for source in read_from(tensor)]

    def program_op(self, op: tf.Operation) -> typing.Optional[tf.Operation]:
        """The operation of the program that an operation stands for; None for an operation that the
        program lacks, such as one in the body of a function."""
        return self._program.get(op.name)

    def is_in_loop(self, op: tf.Operation) -> bool:
        """Whether an operation is in a loop, which may run it more than once."""
        # The body of a loop v2 has the name scope of the loop.
        if any(op.name.startswith(name + '/') for name in self.bodies.loops):
            return True
        # A loop v1 around a call runs the operations of the call's body.
        return self._is_in_loop_v1(self.bodies.outermost_call(op.name))

    def _is_in_loop_v1(self, name: str) -> bool:
        """Whether the operation of a name is in a loop of control flow v1 of the program. The
        program's operation tells, since an import keeps no contexts."""
        original = self._program.get(name)
        return original is not None and compat.in_loop(original)

    def is_stateful(self, op: tf.Operation) -> bool:
        """Whether operations of this type keep values from run to run, or draw random numbers.
        TensorFlow is asked once for each type, since it takes long to answer."""
        if op.type not in self._is_stateful:
            self._is_stateful[op.type] = op.op_def.is_stateful
        return self._is_stateful[op.type]

    def has_operation(self, name: str) -> bool:
        """Whether the scratch graph has an operation of this name of the program."""
        return name in self._operation_names

    def is_in_order_of_examples(self, state: State) -> bool:
        """Whether a tensor with rows of single examples has them in the order of the examples: all
        rows of an example come before the first row of the next example. The rows of all towers,
        tower by tower, are in this order alone."""
        is_in_one_round = state.outer == 1 and self.is_of_one_round(state.selection)
        return state.is_by_example and state.axis == 0 and is_in_one_round

    def is_of_one_round(self, selection: str) -> bool:
        """Whether a selection chose its rows of one round of all examples. Rows of two rounds, as
        of `tf.concat([x, x], 0)`, are in another order on towers: first both rounds of shard 0,
        then both of shard 1.

        Args:
          selection: `State.selection` of the rows.
        """
        while self.has_operation(selection):  # else it is an input of the batch
            op = self.graph.get_operation_by_name(selection)
            positions = self.state(op.outputs[0])
            if positions.kind is not Kind.ROW_POSITION:
                return positions.outer == 1
            # The operation chose among the rows of an earlier selection, by a mask with an entry
            # for each of these rows.
            mask = self.state(op.inputs[0])
            selection = mask.selection
        return True

    def merges_of_frame(self, frame: str) -> typing.List[tf.Operation]:
        """The `Merge`s of a loop of control flow v1, at which its iterations begin."""
        return self._merges.get(frame, [])

    def _original(self, tensor: tf.Tensor):
        """The tensor of the program that a tensor stands for; None for a tensor that the program
        lacks."""
        op = self.program_op(tensor.op)
        return None if op is None else op.outputs[tensor.value_index]

    # ---- what rules tell

    def note(self, statistic: str, op: tf.Operation, why: str) -> None:
        """Notes why a proof ends at a statistic of the shard, unless that is noted already.

        Args:
          statistic: the name of the operation that computes it.
          op: the operation that uses it otherwise than linearly.
          why: the predicate of a sentence whose subject is `op`.
        """
        self.reasons.setdefault(statistic, Reason(op.name, op.type, why))

    def suppose(self, op: tf.Operation, what: str) -> None:
        """Notes what a proof supposes of an operation, since the graph does not tell it: that
        `tf.reshape(x, (-1, 5))` takes 5 numbers of each example of x [n, L], L not being static.

        The rule marks the results with the operation's name, as if it were a statistic of the
        shard. The verdict of a loss with this mark has the supposition as its condition. Where the
        supposition can be no condition, the mark ends the proof as any other mark does
        (`verdict._ends`), for the reason that is noted here.

        Args:
          op: the operation.
          what: the predicate of a sentence whose subject is `op`.
        """
        self.note(op.name, op, 'is right only if it %s, which is not known' % what)
        self.suppositions[op.name] = "'%s' %s" % (op.name, what)

    def remembered(self, function: typing.Callable, tensor: tf.Tensor, argument: typing.Any,
                   meanwhile: typing.Any) -> typing.Any:
        """The result of `function(tensor, argument, view)`, computed once. The function follows a
        tensor back: it calls `remembered` for the inputs of the tensor's operation.

        Args:
          function: the function.
          tensor: a tensor of the scratch graph.
          argument: a value that can be a key.
          meanwhile: what the result is taken to be where a loop leads back to the tensor, whose
            result is still being computed.
        """
        key = function, tensor.name, argument
        if key not in self._results:
            self._results[key] = meanwhile
            self._results[key] = function(tensor, argument, self)
        return self._results[key]


def _is_static(length: typing.Optional[int]) -> bool:
    """Whether a length of a shape is known."""
    return length is not None


_WIDE_INTEGERS = (tf.int32, tf.int64)  # they hold the number of any row, and of all examples


def is_wide(tensor: tf.Tensor) -> bool:
    """Whether the type of a tensor holds the numbers of all rows of a batch. In an int8 the number
    128 overflows: it does so on the batch, and not on a shard of 100 rows."""
    return tensor.dtype in _WIDE_INTEGERS


def same_numbers_behind(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor of whole numbers that a tensor hands on: as it is, or cast from one type to
    another, where both types hold all of these numbers (`is_wide`)."""
    while True:
        op = tensor.op
        is_exact_cast = op.type == 'Cast' and is_wide(tensor) and is_wide(op.inputs[0])
        hands_on = op.type == 'Identity' or is_exact_cast
        if not hands_on:
            return tensor
        tensor = op.inputs[0]


def _merges_by_frame(graph: tf.Graph) -> typing.Dict[str, typing.List[tf.Operation]]:
    """{name of the frame of a loop: its `Merge`s, each behind an `Enter`}."""
    found: typing.Dict[str, typing.List[tf.Operation]] = {}
    for op in graph.get_operations():
        if op.type not in ('Enter', 'RefEnter'):
            continue
        merges = found.setdefault(op.get_attr('frame_name'), [])
        for taker in op.outputs[0].consumers():
            if taker.type == 'Merge':  # any other taker is in the loop, and takes a loop invariant
                merges.append(taker)
    return found


class Arrays:
    """The states of the elements of `tf.TensorArray`s, by the name of the operation that made each.

    In each round of the fixed point the arrays are written anew. A read that comes before the
    writes of a round gets what the round before has written.
    """

    def __init__(self) -> None:
        """Begins before the first round: nothing is written."""
        self._before: typing.Dict[str, State] = {}  # by the round before
        self._written: typing.Dict[str, State] = {}  # by this round
        # {name of an array: names of the operations in branches or loops that write to it}, of all
        # rounds
        self._in_choices: typing.Dict[str, typing.Set[str]] = {}

    def begin_round(self) -> None:
        """Forgets what was written in the round before the last one."""
        self._before = self._written
        self._written = {}

    @property
    def are_settled(self) -> bool:
        """Whether this round has written the same states as the round before."""
        return self._before == self._written

    def element(self, name: str) -> typing.Optional[State]:
        """The state of the elements of an array; None where nothing is written yet."""
        return self._written.get(name, self._before.get(name))

    def written(self, name: str) -> typing.Optional[State]:
        """The state of what this round has written to an array; None for nothing."""
        return self._written.get(name)

    def writes_in_choices(self, name: str) -> typing.Set[str]:
        """The names of the operations in branches or loops that write to an array."""
        return self._in_choices.get(name, set())

    def write(self, name: str, state: State, in_choice: typing.Optional[str] = None) -> None:
        """Sets the state of the elements of an array.

        Args:
          name: the name of the operation that made the array.
          state: the state of all elements.
          in_choice: the name of the operation that writes, if it is in a branch or a loop.
        """
        self._written[name] = state
        if in_choice is not None:
            self._in_choices.setdefault(name, set()).add(in_choice)
