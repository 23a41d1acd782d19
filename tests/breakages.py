"""Breaks the code on purpose, one line at a time, and says which breakages no fast test notices.

    $ python tests/breakages.py [--only=reduce/] [--check]

Each entry is applied alone to a copy of the tree, whose tests have to pass without it. It is named
by its file and text, so that code that has moved on is an error: then the entry has to be renewed.
`--check` only looks for the texts.

What breaks `towers/fronts` is noticed on a TensorFlow with Keras 2 and estimators, such as 2.15: on
later ones these tests are skipped.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# (file, old text, which is there once, new text, tests that should notice, in tests/)
BREAKAGES = [
    ('towers/proof/static_batch.py', '            if op.name in in_chain:\n',
     '            if False:\n', 'proof/test_static_batch.py'),
    ('towers/proof/analysis.py', '    if not have_one_size(forward_pass.needed.inputs):',
     '    if False:', 'proof/test_static_batch.py'),
    ('towers/proof/rules/rows.py', 'places.axis == 0 and values.layout == places.layout',
     'places.axis == 0', 'proof/test_rules.py'),
    ('towers/proof/rules/totals.py', '    if kinds == {Kind.SHARE}:\n',
     '    if Kind.SHARE in kinds:\n', 'proof/test_rules.py'),
    ('towers/proof/rules/moves.py', '    return as_numbers(op, arguments, view)',
     '    return arguments', 'proof/test_verdict.py'),
    ('towers/proof/rules/layout.py', '    if not are_shared_arguments(arguments):',
     '    if False:', 'proof/test_rules.py'),
    ('towers/proof/rules/recurrent.py', '    if layout.axis != 0:',
     '    if False:', 'proof/test_rules.py'),
    ('towers/proof/rules/products.py',
     'are_within_equations = is_of_batch(solutions) and solutions.axis >= rank - 2',
     'are_within_equations = False', 'proof/test_rules.py'),
    ('towers/proof/rules/images.py', '    if not has_examples_first(state) or not have_same_images:',
     '    if not has_examples_first(state):', 'proof/test_rules.py'),
    ('towers/proof/rules/layout.py', 'computes_entries(_along_axes)',
     'moves_entries(_along_axes)', 'proof/test_verdict.py'),
    ('towers/proof/rules/layout.py', '    if not dropped:',
     '    if False:', 'proof/test_verdict.py'),
    ('towers/proof/transfer.py', 'looks_upstream = row is not None and row.takes_unknown',
     'looks_upstream = False', 'proof/test_verdict.py'),
    ('towers/proof/by_table.py', '    if not row.accounts_for_totals:',
     '    if False:', 'proof/test_verdict.py'),
    ('towers/proof/by_table.py', '    if keeps_values and op.type',
     '    if False and op.type', 'proof/test_verdict.py'),
    ('towers/proof/rules/entries.py', '        if holds_all_sizes or holds_fractions:',
     '        if True:', 'proof/test_verdict.py'),
    ('towers/proof/rules/loops.py', '    for condition in conditions:',
     '    for condition in ():', 'proof/test_verdict.py'),
    ('towers/proof/rules/images.py', 'if has_examples_first(states[0]) and not has_dimension_of_examples:',
     'if False:', 'proof/test_verdict.py'),
    ('towers/proof/rules/slices.py', 'if not is_column or column.begin is None or column.begin < 0:',
     'if not is_column:', 'proof/test_verdict.py'),
    ('towers/proof/rules/slices.py', '    if any(have_number_of_examples):',
     '    if False:', 'proof/test_rules.py'),
    ('towers/proof/rules/layout.py', '    if not entries.is_total_or_share or are_zeros(op.inputs[-1], view):',
     '    if True:', 'proof/test_rules.py'),
    ('towers/proof/written_before.py', '            if call in self._bodies.loops:',
     '            if False:', 'proof/test_verdict.py'),
    ('towers/proof/written_before.py', '        decisive += conditions_around(write, view)',
     '        pass', 'proof/test_verdict.py'),
    ('towers/proof/rules/loops_v2.py', '    if may_have_elements_of_examples:',
     '    if True:', 'proof/test_verdict.py'),
    ('towers/proof/rules/reductions.py', '    if op.outputs[0].dtype.is_integer:',
     '    if False:', 'proof/test_verdict.py'),
    ('towers/proof/rules/products.py', 'if not all(has_one_entry_along(factor.axis, factor.tensor, view)',
     'if not all(True', 'proof/test_rules.py'),
    ('towers/proof/rules/joining.py', 'if not are_of_one_example and not _have_place_of_each(',
     'if False and (', 'proof/test_rules.py'),
    ('towers/proof/written.py', 'return is_in_one_factor and all(is_shared(factor) for factor in factors)',
     'return is_in_one_factor', 'roles/test_written_values.py'),
    ('towers/proof/verdict.py', 'has_offset = total.has_offset or state.has_offset',
     'has_offset = total.has_offset', 'proof/test_analysis.py'),
    ('towers/proof/fixed_point.py', 'elif self._is_static_in_program(tensor, state):',
     'elif False:', 'proof/test_verdict.py'),
    ('towers/proof/conditions.py', '    if beside_loss:', '    if False:',
     'roles/test_running_counts.py'),
    ('towers/shards/cut_batch.py', '[share / sum(shares) for share in shares]',
     '[1. / len(shares) for share in shares]', 'shards/test_shares.py'),
    ('towers/shards/cut_batch.py', "only_device('/cpu:0'):", "only_device('/cpu:1'):",
     'inspect/test_audit.py'),
    ('towers/shards/cut_batch.py', 'tf.where_v2(weight > 0., value, tf.zeros_like(value))', 'value',
     'shards/test_empty_shards.py model/test_outputs.py'),
    ('towers/shards/cut_batch.py', 'return ShardSizes(sizes, size_per_share * unit)',
     'return ShardSizes(sizes, size)', 'shards/test_cut_batch.py'),
    ('towers/model/outputs.py', 'terms.append(weighted(value, weight))',
     'terms.append(weighted(value, weights[0]))', 'model/test_outputs.py shards/test_shares.py'),
    ('towers/whole_batch/exchange.py', 'map(weighted, values, self._weights)',
     'map(zero_if_empty, values, self._weights)', 'whole_batch/test_batch_values.py'),
    ('towers/whole_batch/exchange.py', 'return [weighted(total, weight)',
     'return [zero_if_empty(total, weight)', 'whole_batch/test_batch_values.py'),
    ('towers/whole_batch/sync_batch_norm.py', '(batch.count / tf.maximum(batch.count - 1., 1.))', '1.',
     'whole_batch/test_batch_values.py'),
    ('towers/whole_batch/sync_batch_norm.py', 'offset - (mean - constant_mean) * factor',
     'offset', 'whole_batch/test_batch_values.py'),
    ('towers/gradients/backward_pass.py', 'loss * tf.cast(scale, loss.dtype)', 'loss',
     'shards/test_shares.py shards/test_empty_shards.py'),
    ('towers/gradients/backward_pass.py', ' loss = loss * scale\n', ' pass\n',
     'api/test_build.py'),
    ('towers/roles/reads_before_writes.py', 'write.op.name in step and taker.name not in step', 'False',
     'roles/test_inline_updates.py'),
    ('towers/copies/copy.py', 'compat.set_device(copied.operation(name), device_of_copy)', 'pass',
     'copies/test_copy.py inspect/test_audit.py'),
    ('towers/copies/template.py', 'operations_named(graph, awaited_names)', '[]',
     'roles/test_inline_updates.py'),
    ('towers/variables/initial_values.py', 'substitutes.get(tensor.name, tensor)', 'tensor',
     'variables/test_initial_values.py'),
    ('towers/variables/tf1_variables.py', "handles.add(variable.op.name + ':0')", 'pass',
     'variables/test_tf1_variables.py'),
    ('towers/graph/edit.py', 'to_visit.append(gradients[name])', 'pass', 'copies/test_copy.py'),
    ('towers/roles/ownership.py', ' if operation_of(each).name in waiting_for_writers]', ']',
     'copies/test_copy.py'),
    ('towers/roles/ownership.py', '    return writers + batch_values + for_metrics',
     '    return []', 'roles/test_written_values.py'),
    ('towers/roles/ownership.py', '        return for_metrics', '        return []',
     'roles/test_inline_updates.py'),
    ('towers/roles/ownership.py', '    first_writes = _without(writes, others)',
     '    first_writes = _without(to_prove, others)', 'roles/test_ownership.py'),
    ('towers/roles/write_order.py', 'towers[:1] if role == FIRST else towers',
     'towers if role == EVERY else towers[:1]', 'roles/test_ownership.py'),
    ('towers/reduce/replicas.py', '_replica_name(variable, tower=num_towers)',
     '_replica_name(variable, tower=1 if num_towers == 1 else 99)', 'reduce/test_replicas.py'),
    ('towers/placement/stages.py', 'bool(resources_taken(op))',
     'False', 'capture/test_stage_cuts.py'),
    ('towers/roles/variable_roles.py', 'variables_of_parts[part]', 'variables_of_parts[1]',
     'roles/test_ownership.py'),
    ('towers/roles/turns.py', 'waits.add(take.op, end, reason):', 'True:',
     'roles/test_metric_counters.py roles/test_write_order.py'),
    ('towers/graph/waits.py', 'if self._precedence.waits_for(awaited, held):', 'if False:',
     'roles/test_write_order.py roles/test_inline_updates.py'),
    ('towers/roles/update_order.py', 'make_wait(reference_writes, [all_fetched]', 'make_wait([], [all_fetched]',
     'roles/test_update_order.py'),
    ('towers/reduce/micro_batches.py', ' and op.name in varying', '',
     'reduce/test_accumulation.py'),
    ('towers/gradients/backward_pass.py', 'loss * _one_after(data_loss)', 'loss * 1.',
     'reduce/test_accumulation.py'),
    ('towers/capture/stage_costs.py', 'cuts.append(start - 1)', 'cuts.append(start)',
     'capture/test_stage_cuts.py'),
    ('towers/shards/cut_inputs.py', 'sum(sizes), is_even)', 'sizes[0], is_even)',
     'shards/test_cut_inputs.py'),
    ('towers/reduce/combination.py', 'tf.add_n([dense(gradient, variable) for gradient in '
     'gradients])', 'dense(gradients[0], variable)', 'reduce/test_combination.py'),
    ('towers/reduce/combination.py', 'only_device(variable.device or None)', 'only_device(None)',
     'reduce/test_combination.py'),
    ('towers/reduce/micro_batches.py', 'micro_batches[start:start + per_tower]',
     'micro_batches[start:start + per_tower - 1]', 'reduce/test_accumulation.py'),
    ('towers/reduce/combination.py', 'only_device(device)', 'only_device(devices[0])',
     'reduce/test_combination.py reduce/test_replicas.py'),
    ('towers/reduce/loss_scale.py', 'values / tf.cast(self.scale, values.dtype)',
     'values', 'reduce/test_loss_scale.py'),
    ('towers/reduce/loss_scale.py', 'good_steps >= rule.growth', 'good_steps > rule.growth',
     'reduce/test_loss_scale.py'),
    ('towers/reduce/loss_scale.py', 'tf.maximum(self.scale / rule.factor, rule.least)',
     'self.scale / rule.factor', 'reduce/test_loss_scale.py'),
    ('towers/reduce/update.py', 'scopes.enter_context(tf.control_dependencies(after))', 'pass',
     'api/test_train_ops.py roles/test_update_order.py'),
    ('towers/reduce/schedules.py', 'min(num_stages - stage, micro_batches)',
     'min(num_stages, micro_batches)', 'reduce/test_stage_pipeline.py'),
    ('towers/reduce/replicas.py', 'index = tower - 1', 'index = 0',
     'reduce/test_replicas.py'),
    ('towers/gradients/gradient_pairs.py', 'rows, place = tf.unique(slices.indices)',
     'rows, place = slices.indices, tf.range(tf.size(slices.indices))',
     'reduce/test_sparse_rows.py'),
    ('towers/recompute/segments.py', 'return sum(crossing[cut] for cut in cuts) + max(',
     'return max(', 'recompute'),
    ('towers/recompute/rewrite.py', 'names_of(inputs_of(op))', 'names_of(producers_of(op))',
     'recompute'),
    ('towers/roles/written_values.py', 'proven.reasons[judged.variable] = judged.verdict.reason', 'pass',
     'roles/test_written_values.py'),
    ('towers/placement/variable_device.py', 'return min(self._bytes_of_devices, key',
     'return max(self._bytes_of_devices, key', 'placement/test_variable_device.py'),
    ('towers/graph/graph_walk.py', 'inputs = inputs_of(op)',
     'inputs = producers_of(op)', 'roles/test_update_order.py'),
    ('towers/api/train_ops.py', 'global_step if is_last else None',
     'global_step',
     'api/test_train_ops.py'),
    ('towers/api/call_for_each.py', 'scale=common.loss_factors[index])',
     'scale=common.loss_factors[0])', 'api/test_build.py api/test_reuse.py'),
    ('towers/run/weights.py', 'tf.control_dependencies([train_op])', 'tf.control_dependencies([])',
     'run/test_weights.py'),
    ('towers/run/learning_rate.py', 'math.sqrt(num_towers)', 'num_towers',
     'run/test_learning_rate.py'),
    ('towers/run/learning_rate.py', 'examples / self._warmup_examples', 'examples',
     'run/test_learning_rate.py'),
    ('towers/run/evaluation.py', 'float(mean) * size', 'float(mean)', 'run/test_evaluation.py'),
    ('towers/run/checkpoint_hook.py', 'return step // self._save_steps > self._saved_step // '
     'self._save_steps', 'return step % self._save_steps == 0', 'run/test_checkpoint_hook.py'),
    ('towers/run/summaries.py', 'self._step += 1\n', 'self._step += 2\n',
     'run/test_summaries.py'),
    ('towers/cluster/worker_step.py', 'self.own_examples() * self.factor_of_one_example',
     'self.factor_of_one_example', 'cluster/test_ring.py'),
    ('towers/roles/metric_counters.py', 'weighted(addition.value, weight))', 'addition.value)',
     'shards/test_uneven_counts.py'),
    ('towers/copies/closure_tensors.py', 'if tensor.name in self._names_of_losses:', 'if False:',
     'copies/test_closure_tensors.py'),
    ('towers/run/summaries.py', 'small = num_towers * _sum_of', 'small = _sum_of',
     'run/test_summaries.py'),
    ('towers/cluster/worker_step.py', 'self.constant = 1. / cluster.num_workers if self.is_mean else 1.',
     'self.constant = 1.', 'cluster/test_ring.py'),
    ('datasets/image_set.py', 'np.searchsorted(good, np.arange(count))', 'np.arange(count)',
     'datasets/test_bad_examples.py'),
    ('datasets/epochs.py', 'within, tf.zeros_like(within)', 'tf.zeros_like(within), within',
     'datasets/test_arrays.py'),
    ('towers/cluster/ring.py', '    if tensors.arrived:', '    if False:',
     'cluster/test_tensor_exchange.py'),
    ('towers/cluster/tensor_exchange.py', '        with tf.control_dependencies([awaited]):',
     '        with tf.control_dependencies([]):', 'cluster/test_tensor_exchange.py'),
    ('towers/cluster/connection.py', 'is_ring and _is_of_other_worker(error)', 'False',
     'cluster/test_tensor_exchange.py'),
    ('towers/cluster/collectives.py', '([awaited]):\n                return', '([]):\n                return',
     'cluster/test_ring.py'),
    ('towers/cluster/horovod.py', 'pred=self._has_begun', 'pred=tf.constant(True)',
     'cluster/test_horovod.py'),
    ('towers/cluster/horovod.py', 'return tf.placeholder_with_default(values, tensor.shape)',
     'return values', 'cluster/test_horovod.py'),
    ('towers/cluster/parameter_servers.py', 'tf.cast(gradient.indices, tf.int64)',
     'tf.identity(gradient.indices)', 'cluster/test_signature.py'),
    ('towers/cluster/connection.py', 'a loss.\n            self.raise_if_lost()',
     'a loss.\n            pass', 'cluster/test_coordinator.py'),
    ('towers/cluster/between_steps.py', '[[name, int(checksum)] for', '[[name, 0] for',
     'cluster/test_between_steps.py'),
    ('towers/memory/simulation.py', '== 1 and buffer.what != ', '== 1 or buffer.what != ',
     'memory/test_simulation.py'),
    ('towers/memory/step_graph.py', 'awaited_by_folded[node] = awaited', 'pass',
     'memory/test_simulation.py'),
    ('towers/memory/kernels.py', '* images * convolution.places', '* convolution.places',
     'memory/test_kernels.py'),
    ('towers/fronts/keras_towers.py', 'weighted_sum(terms, weights)', 'terms[0]',
     'fronts/test_keras_model.py'),
    ('towers/fronts/optimizer_calls.py', 'return loss * weight',
     'return loss', 'fronts/test_optimizer_calls.py'),
    ('towers/placement/tower_device.py', 'op.name.replace(tower.name_scope, first.name_scope)',
     'first.name_scope + op.name[len(tower.name_scope):]', 'inspect/test_audit.py'),
    ('towers/placement/shared_reads.py', '        found.pop(name, None)\n', '        pass\n',
     'placement/test_shared_reads.py'),
    ('towers/placement/shared_reads.py', 'not compat.in_control_flow(read)', 'True',
     'placement/test_shared_reads.py'),
    ('towers/inspect/audit.py', 'device in stages_of(tower.device):', 'True:',
     'inspect/test_audit.py'),
    ('towers/inspect/comparison.py', 'largest_value(one[finite] - many[finite])', '0.',
     'inspect/test_check.py'),
    ('towers/checkpoint/newest.py', 'in reversed(candidates):', 'in candidates:',
     'checkpoint/test_checkpoint_files.py'),
    ('towers/checkpoint/match.py', 'if dtype != wanted.dtype:', 'if False:',
     'checkpoint/test_checkpoint_match.py'),
    ('trainer/weight_decay_optimizers.py', 'gradient + self._weight_decay * value', 'gradient',
     'trainer/test_weight_decay_optimizers.py'),
    ('datasets/epochs.py', 'self.length -= num_examples % batch_size', 'pass',
     'datasets/test_arrays.py'),
    ('datasets/preprocessing.py', 'draws[MIRRORED] >= 0.5)', 'draws[MIRRORED] < 0.5)',
     'datasets/test_preprocessing.py'),
    ('towers/graph/import_again.py', '            pivot = imported.tensor(context.pivot)\n',
     '            continue\n', 'api/test_finished_branches.py'),
    ('towers/roles/metric_counters.py', '            if _writes_list_of_rows(op):\n',
     '            if False:\n', 'roles/test_written_values.py'),
    ('towers/api/equality_line.py', 'counters_read=list(_with_role(METRIC, {**writers_for_update, '
     '**writers_for_loss}, roles))', 'counters_read=[]', 'roles/test_running_counts.py'),
    ('towers/cluster/machines.py', '    if device.startswith(task + \'/\'):\n',
     '    if False:\n', 'cluster/test_sessions.py'),
]


def misplaced():
    """Texts: the entries whose old text is not once in its file."""
    found = []
    for path, old, _, _ in BREAKAGES:
        try:
            with open(os.path.join(ROOT, path), encoding='utf-8') as source:
                count = source.read().count(old)
        except FileNotFoundError:
            count = 0
        if count != 1:
            found.append('%s has %d times: %s' % (path, count, old))
    return found


def is_noticed(tree, path, old, new, tests):
    """Whether a test fails with the breakage in the copy of the tree, which is mended after."""
    path = os.path.join(tree, path)
    with open(path, encoding='utf-8') as source:
        whole = source.read()
    try:
        with open(path, 'w', encoding='utf-8') as broken:
            broken.write(whole.replace(old, new))
        done = subprocess.run(
            [sys.executable, '-m', 'pytest', '-q', '-x', '-m', 'not slow', '-p', 'no:cacheprovider']
            + [os.path.join('tests', each) for each in tests.split()], cwd=tree,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
    finally:
        with open(path, 'w', encoding='utf-8') as mended:
            mended.write(whole)
    if done.returncode not in (0, 1):
        sys.exit('pytest %s ended with %d:\n%s' % (tests, done.returncode, done.stdout[-2000:]))
    return done.returncode == 1


def main():
    """Runs the breakages, and ends with 1 where one of them is not noticed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--only', default='', help='part of the path of the files to break')
    parser.add_argument('--check', action='store_true', help='only look for the texts')
    options = parser.parse_args()
    moved = misplaced()
    if moved:
        sys.exit('%d entries have to be renewed:\n%s' % (len(moved), '\n'.join(moved)))
    if options.check:
        return
    chosen, missed, passing = [each for each in BREAKAGES if options.only in each[0]], 0, set()
    with tempfile.TemporaryDirectory() as folder:
        tree = os.path.join(folder, 'tree')
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns('.git', '.venv*', '__pycache__'))
        for path, old, new, tests in chosen:
            if tests not in passing and is_noticed(tree, path, old, old, tests):
                sys.exit('%s: they fail without a breakage.' % tests)
            passing.add(tests)
            noticed = is_noticed(tree, path, old, new, tests)
            missed += not noticed
            print('%s  %s: %s -> %s' % ('noticed ' if noticed else 'NOT SEEN', path, old, new),
                  flush=True)
    print('%d of %d breakages were noticed' % (len(chosen) - missed, len(chosen)))
    sys.exit(min(missed, 1))


if __name__ == '__main__':
    main()
