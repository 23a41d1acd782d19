"""The result of `build_towers`: `BuiltTowers`, and in it the `Plan`, which fits a screen.

Its test is tests/api/test_plan.py.
"""

import collections
import itertools
import textwrap
import typing

import tensorflow.compat.v1 as tf

from towers.arguments import check_count, check_instance
from towers.errors import InvalidArgumentError, counted
from towers.gradients.tower import Tower
from towers.graph.waits import Wait
from towers.placement.devices import Devices, short_name
from towers.placement.tower_device import stages_of
from towers.placement.variable_device import Placement
from towers.reduce.loss_scale import WatchedLosses
from towers.reduce.replicas import Replicas
from towers.roles.variable_roles import VariableRole
from towers.variables.new_variables import DirectVariable


class PlannedTower(typing.NamedTuple):
    """A row of the plan.

    Attributes:
      index: the index of the tower, from 0.
      device: the device of the tower.
      examples: the number of examples in its shard; None if not static.
      owns: names of the updates that only this tower runs.
    """

    index: int  # type: ignore[assignment]  # not `tuple.index`
    device: str
    examples: typing.Optional[int]
    owns: typing.List[str]


# Widths in columns: of the screen; of what is before a line's text; of names of a tower's devices.
_WIDTH = 100
_WIDTH_OF_LABELS = 19
_WIDTH_OF_DEVICES = 45
_MOST_ROWS = 10  # of towers
_MOST_SIZES = 8  # of shards, in a line

# How a batch is cut whose size is not static, by the word of `remainder`.
_REMAINDERS = {
    'error': ', a remainder is refused',
    'weight': ', a remainder is spread over the shards',
    'drop': ', a remainder is left out'}


class Plan(typing.NamedTuple):
    """The description of a build; `print(plan)` fits a screen.

    Attributes:
      towers: list of `PlannedTower`.
      lines: list of `(label, text)`, as they are printed below the towers.
      batch_size: examples per step: an int, or None if not static.
      remainder: as given to `build_towers`.
      shares: the proportions of the shards: a tuple of ints.
      reduction: as given to `build_towers`.
      initial_of_first: names of variables whose initial value is computed from the first tower's
        part of the batch (data-dependent initialization); one device computes it from the whole
        batch.
      variable_roles: list of `VariableRole`: who writes each variable, and why.
      waits: list of `Wait`: the control edges that the build has added so that a write comes at the
        right time, each with its reason.
    """

    towers: typing.List[PlannedTower]
    lines: typing.List[typing.Tuple[str, str]]
    batch_size: typing.Optional[int]
    remainder: str
    shares: typing.Tuple[int, ...]
    reduction: str
    initial_of_first: typing.List[str]
    variable_roles: typing.List[VariableRole]
    waits: typing.List[Wait]

    def line(self, label: str) -> typing.Optional[str]:
        """The text after a label, such as `'batch norm'`; None where the plan has no such line.

        Raises:
          InvalidArgumentError: the label is no string.
        """
        check_instance('label', label, str, 'one of the words in front of a line, such as %s'
                       % ', '.join(repr(each) for each, _ in self.lines[:3]))
        return dict(self.lines).get(label)

    def with_line(self, label: str, text: str) -> 'Plan':
        """The same plan with another text after one of its labels."""
        lines = [(each, text if each == label else old) for each, old in self.lines]
        return self._replace(lines=lines)

    def explain(self, most_names: int = 4) -> str:
        """Says why each variable has its role, and why operations wait for others.

        >>> print(built.plan.explain())
        variables
          all towers together: the loss trains it, since it is trainable
            dense/kernel, dense/bias
          tower 0 alone: it is a moving average of a statistic of the examples
            batch_normalization/moving_mean, batch_normalization/moving_variance
        waits
          batch_normalization/AssignMovingAvg/AssignSubVariableOp waits for 1 operation
            tower_1/batch_normalization/ReadVariableOp: it reads variable … before this write

        Args:
          most_names: how many variables of one role, and how many operations that one operation
            waits for, are named; others are counted.

        Returns:
          The text, of any number of lines. `variable_roles` and `waits` have the same as values.

        Raises:
          InvalidArgumentError: `most_names` is no positive int.
        """
        check_count('most_names', most_names)
        return '\n'.join(_explained_roles(self.variable_roles, most_names)
                         + _explained_waits(self.waits, most_names))

    def __str__(self):
        """The text of a screen: the towers, and below them the lines."""
        header, *rows = self._table()
        if len(rows) > _MOST_ROWS:  # then the first rows and the last row
            rows = rows[:_MOST_ROWS - 2] + ['  ...', rows[-1]]
        printed = [self._batch(), header] + rows
        for label, text in self.lines:
            shown_label = label
            for line in textwrap.wrap(text, _WIDTH - _WIDTH_OF_LABELS):
                printed.append('  %-15s  %s' % (shown_label, line))
                shown_label = ''  # only the first line of a text has it
        return '\n'.join(line[:_WIDTH] for line in printed)

    def _table(self) -> typing.List[str]:
        """The header of the towers' table, and a row for each tower, in aligned columns."""
        names_of_devices = [_row_name(tower.device) for tower in self.towers]
        width = max([12] + [len(name) for name in names_of_devices])
        row = '  {:<5}  {:<{width}}  {:<8}  {}'
        table = [row.format('tower', 'device', 'examples', 'does alone', width=width)]
        for tower, name in zip(self.towers, names_of_devices):
            examples = '?' if tower.examples is None else str(tower.examples)
            does_alone = ', '.join(tower.owns) or '-'
            table.append(row.format(tower.index, name, examples, does_alone, width=width))
        return table

    def _batch(self) -> str:
        """The first line of the text: how many towers there are, and how the batch is cut."""
        sizes = [tower.examples for tower in self.towers]
        towers = counted(len(sizes), 'tower')
        if self.batch_size is None:
            return '%s, %s' % (towers, self._batch_of_any_size())
        are_uneven = len(set(sizes)) > 1
        fit_a_line = len(sizes) <= _MOST_SIZES
        terms = []
        if are_uneven and fit_a_line:  # batch 10 = 3 + 3 + 2 + 2
            terms = [str(size) for size in sizes]
        else:  # batch 95 = 5 x 10 + 5 x 9: a term for neighbours of equal size
            for size, neighbours in itertools.groupby(sizes):
                terms.append('%d x %s' % (len(list(neighbours)), size))
        return '%s, batch %d = %s' % (towers, self.batch_size, ' + '.join(terms))

    def _batch_of_any_size(self) -> str:
        """The first line's text on a batch whose size is not static: how it is cut."""
        text = 'a batch of any size'
        if len(self.towers) > 1:
            text += _REMAINDERS[self.remainder]
        if len(set(self.shares)) > 1:
            text += ', shares ' + ' : '.join(map(str, self.shares[:_MOST_SIZES]))
        return text


def _explained_roles(roles: typing.Iterable[VariableRole],
                     most_names: int) -> typing.List[str]:
    """The lines of `Plan.explain` about variables: for each reason, the names of the variables."""
    variables_by_heading: typing.Dict[str, typing.List[str]] = collections.OrderedDict()
    for role in roles:
        heading = '%s: %s' % (role.writer, role.reason)
        variables_by_heading.setdefault(heading, []).append(role.variable)
    lines = ['variables']
    for heading, names in variables_by_heading.items():
        lines += ['  ' + heading, '    ' + briefly(names, most_names)]
    return lines


def _explained_waits(waits: typing.Iterable[Wait], most_names: int) -> typing.List[str]:
    """The lines of `Plan.explain` about waits: for each operation, what it waits for, and why."""
    waits_by_operation: typing.Dict[str, typing.List[Wait]] = collections.OrderedDict()
    for wait in waits:
        waits_by_operation.setdefault(wait.operation, []).append(wait)
    lines = ['waits']
    for operation, waits_of_operation in waits_by_operation.items():
        count = len(waits_of_operation)
        lines.append('  %s waits for %s' % (operation, counted(count, 'operation')))
        for wait in waits_of_operation[:most_names]:
            lines.append('    %s: %s' % (wait.awaited, wait.reason))
        if count > most_names:
            lines.append('    and %d more' % (count - most_names))
    if not waits_by_operation:
        lines.append('  none')
    return lines


def _row_name(device: str) -> str:
    """The names of a tower's devices; only the first and the last where all do not fit in a row."""
    names = short_name(device).split('+')
    if len('+'.join(names)) <= _WIDTH_OF_DEVICES or len(names) <= 2:
        return '+'.join(names)
    return '%s+...+%s (%d devices)' % (names[0], names[-1], len(names))


def briefly(names: typing.Sequence[str], limit: int = 2) -> str:
    """The first `limit` names, and how many more there are: `'a, b and 3 more'`."""
    more = '' if len(names) <= limit else ' and %d more' % (len(names) - limit)
    return ', '.join(names[:limit]) + more


class BuiltTowers(typing.NamedTuple):
    """The result of `build_towers`.

    Attributes:
      train_op: the operation of one step; None without an optimizer. With several losses it is a
        step of all losses; all gradients are computed from the weights before the step.
      loss: scalar, the mean over the batch's examples plus the regularization, as one device
        would compute it from the weights before the update. With several losses a dict of scalars
        by name; `gradients` is a dict of lists then.
      predictions: nest like the model function's, or None: tensors with the examples of the batch
        along the dimension that has the shard's examples; for a mean over the shard the mean over
        the batch, for a sum the sum.
      metrics: dict by the names of the model function's metrics, each over all towers: a scalar, or
        a pair of value and update for one of `tf.metrics`.
      gradients: list of `(gradient, variable)` that the optimizer applies, combined and
        transformed.
      variables: the variables that the model made or that are trained.
      slots: variables that the optimizer made.
      towers: list of `Tower`.
      global_step: the variable that counts steps, or None.
      devices: the towers' devices.
      placement: `Placement` of the variables.
      direct_variables: variables shared by order of creation, for `reuse=` of a later build.
      plan: `Plan`; print it.
      replicas: `Replicas`: the other towers' replicas of the trainable variables; None where the
        towers have no replicas.
      precision: as given; `use_precision` writes it into the session's config.
      scaled_losses: `WatchedLosses`, whose `scale` and `skipped_steps` are scalars to be logged
        with a step; or None.
      xla: as given.
      variable_scope: full name of the scope that the model's variables are under, `''` for none.
      train_ops: with several losses, dict from the name of a loss to the operation of a step of
        that loss alone; else empty. Run them one after the other, in any order; two in one
        `session.run` would race: use `train_op`. Each makes only its loss's computations, and
        counts as one step. A batch-norm update runs with the train op of each loss that is computed
        from its layer.
      machines: the `Machines` of a cluster, with the gradients over them; None without a cluster.
      own_state: list of the state variables of all towers, by variable and then by tower.
        `tf.variables_initializer(built.own_state)` resets all these variables; the initializer of
        the model's variable resets the first tower's alone.
      made: frozenset of the names of the variables that the build has made, and so has placed.
      opened_scopes: dict from each variable scope to the number of times it had been opened before
        the call of the model function: a later build that shares the variables numbers unnamed
        scopes from there.
      batch_tensors: `BatchTensors` of a finished model; None of a model function.
    """

    train_op: typing.Any
    loss: typing.Any
    predictions: typing.Any
    metrics: typing.Dict[str, typing.Any]
    gradients: typing.Any
    variables: typing.List[tf.Variable]
    slots: typing.List[tf.Variable]
    towers: typing.List[Tower]
    global_step: typing.Optional[tf.Variable]
    devices: Devices
    placement: Placement
    direct_variables: typing.Tuple[DirectVariable, ...]
    plan: Plan
    replicas: typing.Optional[Replicas]
    precision: str
    scaled_losses: typing.Optional[WatchedLosses]
    xla: bool
    variable_scope: str
    train_ops: typing.Dict[str, tf.Operation]
    machines: typing.Any
    own_state: typing.List[tf.Variable]
    made: typing.FrozenSet[str]
    opened_scopes: typing.Dict[str, int]
    batch_tensors: typing.Any = None

    def of(self, tensor: tf.Tensor) -> tf.Tensor:
        """The batch's value of a tensor of a finished model, from the towers.

        `session.run([train_op, model.accuracy])` would compute the model once more, on one device;
        `session.run([built.train_op, built.of(model.accuracy)])` does not.

        Args:
          tensor: any tensor of the program. For a loss, a prediction or a metric that was given to
            `build_towers`, the value is the tensor in `built`. For an input that was given as
            `{x: batch}`, it is `batch`; for a summary, a summary of the batch's values. A tensor
            that does not depend on the batch is returned itself. Any other tensor is computed in
            each tower, from the results that the step has there. The towers' values are merged like
            the values of a prediction, by what is proven of the tensor: rows of examples are
            joined, a mean is averaged, a sum is added up.

        Returns:
          A tensor of the shape of `tensor`, for the batch.

        Raises:
          InvalidArgumentError: the build called a model function; or a tensor that was not given to
            `build_towers` draws random numbers, or reads variables that the step writes.
          ModelFunctionError: it is not proven how to merge the tensor.
        """
        check_instance('tensor', tensor, tf.Tensor, 'a tensor of the program')
        if self.batch_tensors is None:
            raise InvalidArgumentError('built.of is for the tensors of a finished model, and this '
                                       'build has called a model function: take built.loss, '
                                       'built.predictions, built.metrics.')
        return self.batch_tensors.of(tensor)

    @property
    def updates_here(self) -> bool:
        """Whether this process updates the variables, a bool.

        False in every worker of synchronous parameter servers except the chief. Operations that a
        program runs after `train_op`, such as moving averages of the weights, are for the process
        that updates the weights.
        """
        return self.machines is None or self.machines.updates_here

    def __repr__(self):
        """The towers and their devices: the fields would fill many screens."""
        names = ['+'.join(stages_of(device)) for device in self.devices]
        return '<BuiltTowers: %s on %s>' % (counted(len(names), 'tower'), ', '.join(names))


def check_same_graph(name: str, built: BuiltTowers) -> None:
    """Raises `InvalidArgumentError` for a build of another graph than the default one.

    Args:
      name: the argument in which the build was given.
      built: the build.
    """
    # The graph of a build is the graph of its variables. A build without variables is not refused.
    graphs = {variable.graph for variable in built.variables}
    if graphs and tf.get_default_graph() not in graphs:
        raise InvalidArgumentError('%s=%r belongs to another graph than the default one: build '
                                   'under the tf.Graph() of that build.' % (name, built))
