"""The arguments of `build_towers`, grouped into the values that the passes of a build take.

`Request` (`model/request.py`) has one value of each type. A pass that needs a few of these values
takes them one by one; a pass that needs most of them takes the request.
"""

import typing

import tensorflow.compat.v1 as tf

from towers.model.objectives import Objectives


class ModelCall(typing.NamedTuple):
    """The model, and how its variables are found.

    Attributes:
      model: a model function; of a finished model its `ModelOutput`, which is replaced by the
        `FinishedModel` when its inputs are known.
      is_finished: whether the model is in the graph already.
      copies: `'clone'` for one call and copies of its graph; `'reuse'` for a call for each tower.
      reuse: the argument `reuse` of the model's variable scope.
      earlier: the `BuiltTowers` whose variables are shared; or None.
      variable_scope: the scope to enter for the model; None for the caller's.
    """

    model: typing.Any
    is_finished: bool
    copies: str
    reuse: typing.Any
    earlier: typing.Any
    variable_scope: typing.Union[None, str, tf.VariableScope]


class Training(typing.NamedTuple):
    """The training: losses and optimizers, and which gradients and updates a step has.

    Attributes:
      objectives: losses with their optimizers; empty for an evaluation.
      reduction: `'mean'` or `'sum'` of the towers' gradients.
      regularization: `'add'` where registered losses are added to the model's; else `'none'`.
      update_ops: whose updates run with a step: `'first'` tower's, `'all'` towers', or `'none'`.
      batch_norm: `'shard'` or `'sync'`: batch norm uses the statistics of the shard, or of the
        whole batch.
      global_step: the variable that counts steps; or None.
    """

    objectives: Objectives
    reduction: str
    regularization: str
    update_ops: str
    batch_norm: str
    global_step: typing.Optional[tf.Variable]


class Part(typing.NamedTuple):
    """The place of one part of the batch.

    Attributes:
      tower: the index of its tower.
      micro_batch: the index of the micro-batch in that tower's shard.
      device: the tower's device.
      scope: the name scope of its operations.
    """

    tower: int
    micro_batch: int
    device: str
    scope: str


class BatchSplit(typing.NamedTuple):
    """How the batch is cut: into a shard for each tower, and each shard into micro-batches.

    Attributes:
      parts: the parts in the order of the batch: tower by tower, then by micro-batch.
      shares: the proportions of the parts' sizes, see `checked_shares`.
      remainder: what is done with a batch that the parts do not divide.
      accumulate: how many micro-batches each tower has.
      parts_before: how many parts the machines before this one have, for seeds of random ops.
      name: prefix of the towers' name scopes: `'tower'`; of a second build `'build_2/tower'`.
    """

    parts: typing.List[Part]
    shares: typing.Tuple[int, ...]
    remainder: str
    accumulate: int
    parts_before: int
    name: str

    @property
    def scope_of_batch(self) -> str:
        """The name scope of what is made for the whole batch, such as its loss: `'towers'`."""
        return self.name + 's'

    @property
    def word_for_parts(self) -> str:
        """The word by which errors call the parts, in the plural."""
        return 'towers' if self.accumulate == 1 else 'micro-batches'


class KeptResults(typing.NamedTuple):
    """The results of the forward pass that are kept for the backward pass, and their order.

    Attributes:
      recompute: the value of `Memory.recompute`; None where all results are kept.
      schedule: the order of micro-batches in the stages; None for one after the other.
      cutting: `Cutting` of the model into stages; None where it is not cut.
    """

    recompute: typing.Union[None, str, typing.Sequence[str]]
    schedule: typing.Optional[str]
    cutting: typing.Any


class NumericsFields(typing.NamedTuple):
    """The fields of `Numerics` (`api/options.py`), which explains and checks them."""

    precision: str
    loss_scale: typing.Any  # `LossScale`, of a room above this one; or None
    xla: bool
    check_numerics: bool
    stateless_random: bool
