"""One tower: calls the model function on one device, splits its loss, takes its gradients."""

import collections
import contextlib
import functools
import re

import tensorflow.compat.v1 as tf

from towers.errors import SharedVariableError
from towers.graph import graph_walk
from towers.graph.variable_access import variables_read
from towers.nonfinite import checked_loss
from towers.placement.loop_state_devices import (keep_arrays_with_readers,
                                                 keep_stacks_with_loops)
from towers.placement.stages import place_forward, says_stages
from towers.placement.tower_device import (BackwardDevice, TowerDevice, keep_off_resources,
                                           keep_reads_in_loops, keep_with_tower, stages_of)
from towers.placement.variable_device import only_device
from towers.placement.xla import compiled, explained
from towers.tower.gradients import TowerGradients, takes_plain_gradients
from towers.tower.model_gradients import GradientsOfModel
from towers.tower.graph_collections import TowerCollections
from towers.tower.inline_updates import InlineUpdates
from towers.tower.keras_calls import record_keras_calls
from towers.tower.refused_builds import undone_on_error
from towers.tower.loss import TowerLosses
from towers.tower.model_calls import ModelCalls
from towers.tower.model_placeholders import tie_placeholders
from towers.tower.refused_builds import call_of_model_fn
from towers.tower.objectives import all_pairs, flat, map_shaped, tensors_of
from towers.tower.one_device_names import note_build
from towers.tower.outputs import call_model_fn, metrics_by_kind, to_model_output
from towers.tower.inner_training import check_no_own_optimizer
from towers.tower.tower_seeds import OwnSeeds
from towers.tower.local_state import OwnState
from towers.tower.recomputed_draws import recomputed_draws
from towers.tower.scoped_collections import looks_within
from towers.tower.variable_visibility import SeenVariables
from towers.tower.stage_cuts import cut_into_stages
from towers.tower.stateless_random import give_own_seeds, make_stateless
from towers.tower.variables import SharedVariables


TowerOptions = collections.namedtuple('TowerOptions', [
    'model_fn', 'objectives', 'adds_registered', 'variable_scope', 'reuse', 'earlier',
    'update_ops', 'gradient_options', 'random_step', 'check_numerics', 'xla', 'recompute',
    'cutting', 'micro_batches', 'called', 'served_rank', 'has_copies'])
"""The options of all towers of a build: arguments of `build_towers`, and:

Fields:
  objectives: `Objectives`.
  adds_registered: whether registered losses are added to the model's own.
  earlier: variables of the earlier build that are to be shared, see `SharedVariables`.
  gradient_options: dict, for `compute_gradients`.
  recompute: `'auto'`, or list of names of kept results, see `recompute.rewrite`; or None.
  cutting: `Cutting`; None where the model is not cut into stages.
  micro_batches: how many each tower has, one after the other or in a pipeline.
  called: `NamesOnOneMachine`, for seeds of random ops.
  served_rank, has_copies: see `InlineUpdates`.
  random_step: the global step, for seeds of random ops; None where these are left as they are.
"""


class Tower(collections.namedtuple('Tower', [
        'index', 'device', 'name_scope', 'inputs', 'size', 'loss', 'predictions', 'metrics',
        'gradients', 'updates', 'variables', 'data_loss', 'micro_batch', 'backward',
        'has_scope'], defaults=(True,))):
    """The model on one device.

    Attributes:
      index: the tower's number, from 0.
      device: the device of its operations and of its gradient operations.
      name_scope: the scope of its operations, such as `'tower_0/'`; the caller's scope where the
        tower has none of its own.
      inputs: its shard: a nest of `placeholder_with_default`s, which can be fed by hand.
      size: examples in the shard: an int, or an int32 scalar.
      loss: scalar, as the model function returned it: the mean over the shard. In a build with
        several losses it is a dict of scalars by name; `data_loss` and `gradients` are dicts, too.
      predictions: as the model function returned them; [shard, …].
      metrics: as the model function returned them.
      gradients: list of `(gradient, variable)`: this tower's share of the combined gradient, which
        is the plain sum of all towers' shares (and of the regularization's gradient). The tower's
        weight is in its share already.
      updates: operations of this tower for batch-norm statistics and the like.
      variables: the model's variables that its operations read, directly or as a replica.
      data_loss: scalar, the loss that is differentiated: without the regularization that is
        computed once for all towers.
      micro_batch: the number of this micro-batch in its tower, from 0; 0 where there is only one.
      backward: set of the names of the operations of its backward pass.
      has_scope: whether `name_scope` is its own.
    """
    __slots__ = ()

    @property
    def pairs(self):
        """The `(gradient, variable)` pairs of all losses, one after the other."""
        return all_pairs(self.gradients)

    def __repr__(self):
        return '<Tower %d%s on %s>' % (
            self.index, ', micro-batch %d' % self.micro_batch if self.micro_batch else '',
            '+'.join(stages_of(self.device)))


class TowerBuilder:
    """Builds towers one after the other; the first tower makes the variables that all share.

    Attributes:
      variables: the shared variables, known after the first tower.
      gradients: `TowerGradients`.
      losses: `TowerLosses`.
      called: `NamesOnOneMachine`.
      random_keys: the constants of a tower that hold seeds, see `make_stateless`.
      direct_variables: see `SharedVariables.direct`.
      stage_cuts: `StageCuts` of the first tower, or None.
      own_seeds: `OwnSeeds`, which is to be told of each tower that `tower` makes.
      own_state: `OwnState`: variables that each tower has of its own.
      inline_updates: `InlineUpdates`: writes of shared variables in the forward pass.
      calls: `ModelCalls`.
      updates_of_optimizers: list of `UPDATE_OPS` that optimizers have made with gradients.
    """

    def __init__(self, options, placement, replicas, num_towers, graph):
        """
        Args:
          options: `TowerOptions`.
          placement: `Placement`.
          replicas: `Replicas` where each tower has replicas of the trained variables; else None.
          num_towers: how many towers there will be.
          graph: the `tf.Graph`.
        """
        self.variables = []
        self.random_keys = {}
        self.called = options.called
        self.stage_cuts = None
        self.updates_of_optimizers = []
        self._options = options
        self._placement = placement
        self._graph = graph
        self._replicas = replicas
        self.losses = TowerLosses(graph, placement, options.adds_registered,
                                  takes_out=takes_plain_gradients(
                                      options.objectives, options.gradient_options))
        self._shared = SharedVariables(placement, options.variable_scope, options.reuse,
                                       options.earlier, replicas,
                                       on_creation=self.losses.registered.creation)
        self._gradients_of_first = 0
        self.own_seeds = OwnSeeds(options.called.parts_before, graph)
        self.own_state = OwnState(num_towers, graph)
        self.inline_updates = InlineUpdates(graph, options.update_ops, num_towers,
                                            options.served_rank, options.has_copies)
        self.calls = ModelCalls()
        self.gradients = TowerGradients(options, placement, replicas, self.own_state, graph)
        self._collections = TowerCollections(graph)
        self._seen_variables = SeenVariables(graph)

    @property
    def replicates(self):
        """Whether every tower has replicas of the trained variables."""
        return self._replicas is not None

    direct_variables = property(lambda self: tuple(self._shared.direct))

    @property
    def owned(self):
        """Names of the variables' own operations."""
        return self._shared.owned

    def updates_before(self):
        """The `UPDATE_OPS` from before the towers, see `TowerCollections`."""
        return self._collections.updates_before()

    def note_updates_of_optimizers(self):
        """Call this after optimizers' own `compute_gradients`, see `optimizer_gradients`."""
        self.updates_of_optimizers = self._collections.note_updates()

    @contextlib.contextmanager
    def undone_on_error(self):
        """Leaves the graph's collections as one device would, or, on an error, as they were."""
        start = len(self._graph.get_operations())
        with undone_on_error(self._graph, self._collections.undo):
            yield
        note_build(self._graph, start)

    def finish(self, towers, weight):
        """Call this when the last tower is built, before anything else joins collections.

        Args:
          towers: list of all `Tower`s.
          weight: the weight of the first tower's loss in the mean.
        """
        if towers[0].data_loss is not None:
            self.losses.finish(weight, flat(towers[0].data_loss)[0].dtype)
        self.own_seeds.give(towers)
        self._shared.number_slots_on()
        self.inline_updates.wait_for_readers(towers)
        self._collections.finish()

    def tie_placeholders(self):
        """Call this when all that reads the towers is built, see `model_placeholders`."""
        tie_placeholders(self.calls)

    def tower(self, index, device, scope, shards, factor):
        """Calls the model function on one device and takes the gradients of its loss there.

        Args:
          index: the tower's number.
          device: its device.
          scope: the name of its name scope; None for that of the caller.
          shards: `Shards`.
          factor: 1 for the gradient of the mean over the batch, N for the recipe's sum.

        Returns:
          `Tower`.
        """
        outer = self._graph.get_name_scope()
        outer = outer + '/' if outer else ''
        inputs = shards.inputs[index]
        of_tower = original = None
        if self._replicas is not None:
            of_tower = functools.partial(self._replicas.of_part, part=index)
            original = self._replicas.original
        self._collections.enter_tower(index, self.losses.registered.shown, of_tower)
        with graph_walk.Recording(self._graph) as made, \
                tf.device(TowerDevice(device)), \
                tf.name_scope(outer if scope is None else scope) as root:
            with self._shared.tower(index, root, outer), record_keras_calls() as keras, \
                    compiled(self._options.xla), self._models_gradients(index, shards), \
                    looks_within(self._graph, root, outer), self._seen_variables.call(index), \
                    call_of_model_fn(self._graph):
                returned = call_model_fn(self._options.model_fn, inputs)
            output = to_model_output(returned, index, bool(self._options.objectives),
                                     self._options.objectives.names)
            keras_updates = keras.updates()
            adds = self._options.adds_registered
            keras_losses = (keras.weight_losses() if adds or not index else [],
                            keras.activity_losses() if adds else [])
        sources = [leaf.op for leaf in tf.nest.flatten(inputs, expand_composites=True)
                   if leaf is not None]
        self.calls.note(made.operations, root, sources)
        is_cut = self._options.cutting is not None and len(stages_of(device)) > 1
        if is_cut:
            self._cut_into_stages(index, made.operations, device, root)
        if not is_cut or says_stages(made.operations):
            place_forward(made.operations, device)
        keep_reads_in_loops(made.operations)
        keep_stacks_with_loops(made.operations)  # of gradients that the model function takes itself
        keep_arrays_with_readers(made.operations, device)
        self.losses.note_call(
            index, made.operations, sources, output.loss, root,
            *(() if self._replicas is None else (tf.trainable_variables(),
                                                 self._replicas.name_of_original)))
        data_operations = graph_walk.reachable_from(
            sources + [op for op in made.operations if graph_walk.is_random(op)], made.operations)
        if self._replicas is not None:
            self._check_own_gradients(index, output, made.operations)
        slots = {slot.op.name for slot in self.slots_of_model()}  # which a Saver made there reads
        used = [variable for variable in variables_read(
            made.operations, self._shared.owned, self._shared.created)
                if variable.op.name not in slots]
        added = self._collections.leave_tower(index, made.operations, self._shared.joined,
                                              self._shared.owned, original)
        if index == 0:
            names = {variable.op.name for variable in self._shared.created}
            self.variables = self._shared.created + [v for v in used if v.op.name not in names]
            self.gradients.choose_variables()
        updates = _unique(added.get(tf.GraphKeys.UPDATE_OPS, []) + keras_updates
                          + list(output.updates or ()))
        taken = self.own_seeds.taken = self._taken_by_model()
        self._settle_writes(index, made.operations, output, taken, updates, data_operations, used,
                            keras.states())
        if not index and self._gradients_of_model() is None:
            check_no_own_optimizer(self._graph, made.operations, _fetches(output) + (
                updates if self._options.objectives else []))
        data_loss = None
        if output.loss is not None:
            with tf.name_scope(root), only_device(_device_of_loss(output.loss, device)):
                data_loss = self.losses.data_loss(index, output.loss, keras_losses,
                                                  self.variables)
                if self._options.check_numerics:
                    data_loss = map_shaped(lambda loss: checked_loss(
                        loss, index, self._options.micro_batches), data_loss)
        gradients, backward = [], []
        if self._options.objectives:
            with tf.name_scope(root), tf.device(BackwardDevice(device)), explained(
                    self._options.xla):
                # Even shards: divided once, so that the sum over N towers has a scale of exactly 1.
                scale = (factor / len(shards.inputs) if shards.is_even
                         else shards.weights[index] * factor)
                gradients, backward = self.gradients.of_tower(index, device, data_loss, scale, used)
        keep_reads_in_loops(sum(backward, []))
        if self._options.gradient_options.get('colocate_gradients_with_ops'):
            keep_with_tower(sum(backward, []), root, device)
        keep_off_resources(sum(backward, []), root)
        # Only now, since a recomputation in the backward pass has to draw what was drawn before.
        self._seed(index, len(shards.inputs), made.operations, sum(backward, []),
                   _fetches(output) + taken + updates + tensors_of(all_pairs(gradients)))
        if self._options.objectives:
            with tf.name_scope(root), tf.device(BackwardDevice(device)):
                gradients = self.gradients.with_recomputation(
                    index, root, made.operations, backward, gradients)
        if self._replicas is not None:
            used = self._replicas.originals(used)
        used = self.own_state.originals(used)
        return Tower(index, device, root, inputs, shards.sizes[index], output.loss,
                     output.predictions, output.metrics, gradients, updates, used, data_loss, 0,
                     frozenset(op.name for operations in backward for op in operations),
                     scope is not None)

    def _models_gradients(self, index, shards):
        """Context of the model function's call; notes the gradients that it takes itself."""
        optimizer = self._gradients_of_model()
        return contextlib.nullcontext() if optimizer is None else optimizer.call(
            index, shards, self._placement)

    def _taken_by_model(self):
        """What a step runs besides the loss where the model function takes gradients; else []."""
        optimizer = self._gradients_of_model()
        return [] if optimizer is None else optimizer.fetches()

    def slots_of_model(self):
        """The slots that the model function's own optimizers have made in the calls."""
        optimizer = self._gradients_of_model()
        return [] if optimizer is None else optimizer.slots()

    def _gradients_of_model(self):
        return next((each.optimizer for each in self._options.objectives
                     if isinstance(each.optimizer, GradientsOfModel)), None)

    def _seed(self, index, num_towers, forward, backward, fetches):
        """Gives the tower's random ops seeds of its own, or of the step."""
        number = self.called.parts_before + index
        if self._options.random_step is None and num_towers == 1 and not number:
            return
        operations = forward + backward
        repeats = {}
        if self._options.random_step is not None:
            repeats = recomputed_draws(forward, backward)
            make_stateless(operations, fetches, self._options.random_step, self._graph.seed,
                           self.random_keys, repeats, self.called)
        give_own_seeds(operations, number, self._graph.seed, self._options.random_step,
                       self.random_keys, repeats, self.called)

    def _check_own_gradients(self, index, output, operations):
        """Refuses gradients that the model function takes itself of variables with replicas.

        `tf.trainable_variables()` lists the model's own variables, which later towers do not read:
        their gradient is None there, so that a term of the loss would be missing without a warning.

        Raises:
          SharedVariableError: a later tower's loss has fewer such operations than the first one's.
        """
        known = graph_walk.ancestors(flat(output.loss)) if output.loss is not None else set()
        count = sum(1 for op in operations
                    if op.name in known and re.search(r'(^|/)gradients(_\d+)?/', op.name))
        if index == 0:
            self._gradients_of_first = count
        elif count < self._gradients_of_first:
            raise SharedVariableError(
                "VariablePlacement('replicated'), and the model function takes gradients of the "
                'variables that tf.trainable_variables() lists: tower %d reads replicas of them, '
                'so that they are missing from its loss. Take them of the variables that '
                'tf.get_variable returns, or use another VariablePlacement.' % index)

    def _settle_writes(self, index, operations, output, taken, updates, data_operations, used,
                       keras_states):
        """Gives the tower its state variables, makes replicas, and settles which tower writes."""
        scalars, pairs = metrics_by_kind(output.metrics)
        fetches = _fetches(output._replace(metrics=scalars)) + taken
        if index == 0:
            step, counted = [{op.name for op in graph_walk.step_operations(each)}
                             for each in (fetches + updates, [update for _, update in pairs])]
            self.own_state.find(operations, step, data_operations, counted, keras_states)
            if self._replicas is not None:
                self._replicas.make([each for each in self._shared.created + used
                                     if not self.own_state.is_state(each)])
            self._collections.keep_local_variables()
        else:
            self.own_state.move_to(index, operations)
        self.inline_updates.settle(
            index, operations, fetches, {variable.op.name for variable in
                                         self.own_state.variables + self.own_state.of_other_towers
                                         + tf.get_collection(tf.GraphKeys.METRIC_VARIABLES)},
            frozenset() if self._replicas is None else self._replicas.names())

    def _cut_into_stages(self, index, operations, device, root):
        variables = variables_read(operations, self._shared.owned, self._shared.created)
        made_on = [variable.device for variable in variables]
        # Variables of an earlier build stay where its towers have them.
        movable = {variable.op.name for variable in self._shared.created
                   } if not index and self._placement.by_stage else ()
        cuts = cut_into_stages(operations, variables, self._shared.owned, device, root, movable,
                               self._options.cutting, self.stage_cuts)
        for variable, before in zip(variables, made_on):
            self._placement.note_moved(variable, before)
        if not index:
            self.stage_cuts = cuts

def _device_of_loss(loss, device):
    """The device for operations on the loss: the loss's own in a tower of several stages."""
    there = flat(loss)[0].op.device
    return TowerDevice(there, stages_of(device)) if there in stages_of(device) else (
        TowerDevice(device))


def _fetches(output):
    """The tensors that a model function returned to be computed, as a flat list."""
    return [tensor for tensor in tf.nest.flatten(
        [output.loss, output.predictions, output.metrics], expand_composites=True)
            if isinstance(getattr(tensor, 'op', tensor), tf.Operation)]


def _unique(entries):
    seen = set()
    return [entry for entry in entries if not (id(entry) in seen or seen.add(id(entry)))]
