"""The role of each variable for the towers, as a table: who writes it, and why.

`ownership` makes the table. The copies, the order of writes, the update and the plan go by it.

Its test is `tests/roles/test_ownership.py`.
"""

import collections
import typing

import tensorflow.compat.v1 as tf

from towers.graph.graph_walk import variables_by_name
from towers.model.request import Request
from towers.roles.inline_updates import InlineUpdates

FIRST = 'first'  # tower 0 writes for all
EVERY = 'every'  # every tower writes, in turn
OWN = 'own'  # one variable for each tower
METRIC = 'metric'  # a counter of a `tf.metrics` pair, to which every tower adds

_KINDS_IN_WORDS = collections.OrderedDict([
    (FIRST, 'averages and counters'),
    (EVERY, 'rows and counts of examples'),
    (OWN, 'state'),
    (METRIC, 'metrics')])
"""{role: what the plan calls the variables that have it}."""


class VariableRole(typing.NamedTuple):
    """Who writes a variable, and why.

    Attributes:
      variable: its name.
      writer: who writes it, such as `'tower 0 alone'`.
      reason: why it is the writer, such as `'it is a moving average of a statistic of the
        examples'`.
    """
    variable: str
    writer: str
    reason: str


class Roles(typing.NamedTuple):
    """The role of each variable for the towers.

    Attributes:
      trained: {name of an objective: list of the variables that its loss trains}.
      role_of: {name of a variable that the model function writes: its role}; it writes in its
        forward pass, by update ops, or by the update_ops of metrics. Where several roles fit, the
        variable has the first of `OWN`, `METRIC`, `EVERY`, `FIRST`.
      reason_of: {name of such a variable: why it has this role, in words}.
      unwritten: names of the variables with the role `FIRST` that no step of this build writes:
        only update ops write them, and without an optimizer, or with `update_ops='none'`, no step
        runs these.
      own_state: {name of a variable of the model that is state of tower 0: list of this variable
        and of the variables that the copies have in its place}. The list is in the order of the
        micro-batches of all towers.
      inline_updates: what the copies do in the place of tower 0's writes of shared variables.
      update_ops_of_every_tower: the update ops of tower 0 that the other towers have, too, in the
        same order. With `copies='clone'` those that a step runs in every tower; with `'reuse'` all,
        since each call of the model function makes all. Tower 0 alone runs the others, such as
        those of batch norms.
      replicas: `Replicas` of the trained variables; or None.
    """
    trained: typing.Dict[typing.Optional[str], typing.List[tf.Variable]]
    role_of: typing.Dict[str, str]
    reason_of: typing.Dict[str, str]
    unwritten: typing.FrozenSet[str]
    own_state: typing.Dict[str, typing.List[tf.Variable]]
    inline_updates: InlineUpdates
    update_ops_of_every_tower: list
    replicas: typing.Any

    @property
    def all_trained(self) -> typing.List[tf.Variable]:
        """List of the variables that are trained, each once."""
        trained: typing.Dict[str, tf.Variable] = {}
        for variables in self.trained.values():
            trained.update(variables_by_name(variables))
        return list(trained.values())

    def names(self, role: str) -> typing.List[str]:
        """Sorted list of the names of the variables that have a role."""
        return sorted(name for name in self.role_of if self.role_of[name] == role)

    def in_copy(self, part: int, micro_batches: int) -> typing.Dict[str, tf.Variable]:
        """{name of a variable that tower 0 uses: the variable that a copy of tower 0 uses in its
        place}.

        Args:
          part: the index of the copy among the micro-batches of all towers.
          micro_batches: how many micro-batches each tower has.
        """
        variables = {}
        if self.replicas is not None:
            tower = part // micro_batches
            variables.update(self.replicas.in_tower(tower))
        for name, variables_of_parts in self.own_state.items():
            variables[name] = variables_of_parts[part]
        return variables

    def own_variables(self, first: int = 0) -> typing.List[tf.Variable]:
        """List of the variables in which the copies keep their own state, in the order of the
        model's variables, and for each of these in the order of the copies.

        Args:
          first: index of the first copy whose variables are listed; 0 also lists the model's own
            variables, which are tower 0's.
        """
        variables = []
        for variables_of_parts in self.own_state.values():
            variables += variables_of_parts[first:]
        return variables

    def describe(self, request: Request) -> typing.Optional[str]:
        """The plan's line on variables: who writes how many, in the build of a `Request`; None
        where the update alone writes."""
        if not self.role_of:
            return None
        phrases = []
        if self.all_trained:
            phrases.append('%s: %d trained' % (self._trainers(), len(self.all_trained)))
        writers = _writers_in_words(request)
        for role, kind in _KINDS_IN_WORDS.items():
            names = set(self.names(role))
            if names - self.unwritten:
                phrases.append('%s: %d %s' % (writers[role], len(names - self.unwritten), kind))
            if names & self.unwritten:
                phrases.append('nobody: %d %s' % (len(names & self.unwritten), kind))
        return '; '.join(phrases)

    def explain(self, request: Request) -> typing.List[VariableRole]:
        """Who writes each variable in the build of a `Request`, and why: first the trained
        variables, then the variables that the model function writes, by role and by name."""
        explained = []
        for objective in request.training.objectives:
            reason = _reason_of_training(objective.name, objective.var_list)
            for variable in self.trained[objective.name]:
                explained.append(VariableRole(variable.op.name, self._trainers(), reason))
        writers = _writers_in_words(request)
        for role in _KINDS_IN_WORDS:
            for name in self.names(role):
                writer = 'nobody' if name in self.unwritten else writers[role]
                explained.append(VariableRole(name, writer, self.reason_of[name]))
        return explained

    def _trainers(self) -> str:
        """Who writes the trained variables, in words."""
        if self.replicas is None:
            return 'all towers together'
        return 'all towers together, a replica each'


def _reason_of_training(loss_name: typing.Optional[str], var_list: typing.Any) -> str:
    """Why a variable is trained, in words.

    Args:
      loss_name: the name of the loss that trains it; None where there is one loss.
      var_list: the argument of the build, which chooses variables; None for all that are trainable.
    """
    reason = 'the loss trains it'
    if loss_name is not None:
        reason = 'the loss %r trains it' % loss_name
    if var_list is None:
        return reason + ', since it is trainable'
    return reason + ', since var_list has it'


def _writers_in_words(request: Request) -> typing.Dict[str, str]:
    """{role: who writes the variables that have it}, in the build of a `Request`."""
    copy = 'tower' if request.split.accumulate == 1 else 'micro-batch'
    has_turns = request.training.update_ops == 'all'
    # With 'none' tower 0 makes the writes whose new value the forward pass uses. Nobody makes the
    # other writes: their variables are in `Roles.unwritten`.
    return {
        FIRST: 'every %s' % copy if has_turns else 'tower 0 alone',
        EVERY: 'every %s, one after the other' % copy,
        METRIC: 'every %s adds to' % copy,
        OWN: 'each %s its own' % copy}
