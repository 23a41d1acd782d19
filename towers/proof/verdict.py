"""The verdict of a proof: whether the loss of N towers is that of one device, in a line."""

import typing

import tensorflow.compat.v1 as tf

from towers.proof.analysis import Analysis
from towers.proof.batch_norms import BatchNorms
from towers.proof.states import Kind, Reason, State


class Verdict(typing.NamedTuple):
    """What is proven of a loss."""
    is_proven: bool  # whether nothing but rounding and random numbers can differ
    text: str  # begins with 'proven' or 'not proven'


class Question(typing.NamedTuple):
    """What a build does to the losses of its towers."""
    reduction: str  # 'mean' or 'sum'
    adds_shards: bool  # whether the losses of the shards are added up with equal weights of 1
    static_size: typing.Optional[int]  # the static number of examples of a shard


def verdict_of(loss: tf.Tensor, analysis: Analysis, batch_norms: BatchNorms,
               question: Question) -> Verdict:
    """Says whether a loss over the towers is that of one device.

    Args:
      loss: scalar, of the analysed forward pass.
      analysis: its `Analysis`.
      batch_norms: its `BatchNorms`.
      question: `Question`, what the build does to the losses.
    """
    state = analysis.of(loss)
    if state.kind is Kind.UNKNOWN:
        return _not_proven(_sentence(state.reason), question, analysis)
    others = [name for name in analysis.in_order(state.estimated)
              if name not in batch_norms.statistics()]
    if others:
        return _not_proven(_sentence(analysis.reasons[others[0]]), question, analysis)
    what = _proven_kind(state, question)
    if what is None:
        return _not_proven(_of_kind(state), question, analysis)
    count = len(analysis.operations)
    text = '%s (%d operations)' % (what, count)
    if state.is_random:
        text += '; random numbers are of each tower'
    if question.static_size is not None:
        text += ('; if no number in the graph was computed from the static size of a shard, %d: a '
                 'batch [None, ...] leaves no doubt' % question.static_size)
    norms = len(batch_norms) if state.estimated else 0
    if not norms:
        return Verdict(True, 'proven: ' + text)
    return Verdict(False, 'proven, but for %d batch norm%s of each shard (batch_norm=\'sync\' takes '
                          'the whole batch\'s statistics): %s' % (
                              norms, '' if norms == 1 else 's', text))


def _proven_kind(state: State, question) -> typing.Optional[str]:
    """What the loss is, where that makes the towers one device; else None."""
    if state.kind is Kind.MEAN:
        return 'the loss is a mean over the examples'
    if state.kind is Kind.INDEPENDENT:
        return 'the loss is the same on every tower'
    if state.kind is Kind.SUM and not state.has_offset and question.adds_shards:
        return 'the loss is a sum over the examples, and the towers add up'
    return None


def _of_kind(state):
    """Why a loss that is neither a mean nor unknown is not proven, in words."""
    if state.kind is Kind.SUM:
        return 'the loss is a sum over the examples, of which the towers take the mean'
    return 'the loss is %s' % state.kind.value


def _sentence(reason: Reason) -> str:
    return "'%s' (%s) %s" % reason


def _not_proven(why, question, analysis):
    advice = 'see towers.batch_sum, check_towers'
    if 'takes no batch of another size' in why and question.static_size is not None:
        operation = why.split(' takes no batch', 1)[0]
        why = 'the graph has the size of a shard, %d, in it (%s)' % (
            question.static_size, operation)
        advice = 'pass a batch [None, ...], and take sizes from tf.shape'
    return Verdict(False, 'not proven: %s; %s' % (why, advice))
