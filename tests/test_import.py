"""Importing towers changes nothing in the program that imports it; each case is a new process."""

import ast
import glob
import json
import os
import re
import subprocess
import sys

import pytest

import pages
from pages import ROOT

# Prints, as JSON, what the import of towers and one use of it without a graph have changed.
PROGRAM = '''
import json, logging, os, sys, warnings
import tensorflow
import tensorflow.compat.v1 as tf

OTHERS = ('tf_slim', 'keras', 'tf_keras', 'matplotlib', 'horovod', 'sklearn', 'scipy', 'pandas',
          'PIL', 'tqdm', 'pynvml', 'absl.flags', 'absl.app', 'pytest')

def logger(name):
    log = logging.getLogger(name)
    return [log.level, log.propagate, log.disabled, [repr(each) for each in log.handlers],
            len(log.filters)]

def state():
    graph = tf.get_default_graph() if not tf.executing_eagerly() else tf.Graph()
    return dict(
        eager=tf.executing_eagerly(),
        resource=tf.resource_variables_enabled(), control_flow=tf.control_flow_v2_enabled(),
        loggers=[logger(name) for name in ('', 'absl', 'tensorflow')],
        verbosity=int(tf.logging.get_verbosity()),
        environ=dict(os.environ), argv=list(sys.argv), meta_path=len(sys.meta_path),
        directory=os.getcwd(), filters=len(warnings.filters),
        operations=len(graph.get_operations()), collections=graph.get_all_collection_keys(),
        seed=graph.seed,
        others=sorted(name for name in OTHERS if name in sys.modules),
        tensorflow=sorted(name for name in sys.modules if name.split('.')[0] == 'tensorflow'))

{setting}
before = state()
path = list(sys.path)
import towers
after = state()
changed = [key for key in before if before[key] != after[key]]
if changed == ['tensorflow']:
    changed.append(sorted(set(after['tensorflow']) - set(before['tensorflow'])))

towers.resolve_devices(2)
towers.session_config(2)
cpu = tf.config.experimental.list_physical_devices('CPU')[0]
try:  # a RuntimeError, had the devices been initialized
    tf.config.experimental.set_virtual_device_configuration(
        cpu, [tf.config.experimental.VirtualDeviceConfiguration() for _ in range(2)])
    initialized = False
except RuntimeError:
    initialized = True
print(json.dumps(dict(changed=changed, initialized=initialized,
                      path=path == sys.path, eager=before['eager'],
                      others=[name for name in after['others'] if name not in before['others']])))
'''


def run(program, **environ):
    variables = dict(os.environ, PYTHONPATH=ROOT, TF_CPP_MIN_LOG_LEVEL='2')
    for name in ('CUDA_VISIBLE_DEVICES', 'TF_USE_LEGACY_KERAS'):
        variables.pop(name, None)
    variables.update(environ)
    process = subprocess.run([sys.executable, '-c', program], cwd=os.path.dirname(ROOT),
                             env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.returncode == 0, process.stderr.decode()[-3000:]
    return process.stdout.decode()


@pytest.mark.slow
@pytest.mark.parametrize('setting', [
    pytest.param('', id='plain'),
    pytest.param('tf.disable_v2_behavior(); tf.add_to_collection("c", tf.constant(1.)); '
                 'tf.set_random_seed(3); logging.getLogger("absl").setLevel(7); '
                 'tf.logging.set_verbosity(50)', id='legacy program')])
def test_nothing_is_changed(setting):
    report = json.loads(run(PROGRAM.format(setting=setting)))
    assert report['changed'] == [] and report['others'] == []
    assert not report['initialized'] and report['path']


def test_errors_are_caught_by_what_legacy_code_catches():
    from towers import errors
    builtin = {'InvalidArgumentError': ValueError, 'DeviceError': ValueError,
               'InputError': ValueError, 'ModelFunctionError': TypeError,
               'SharedVariableError': ValueError, 'NameScopeError': ValueError,
               'GradientError': ValueError}
    for name, kind in builtin.items():
        error = getattr(errors, name)
        assert issubclass(error, errors.TowersError) and issubclass(error, kind)
    assert not issubclass(errors.TowersError, (ValueError, TypeError))


def public_functions():
    """(name, function) of the public functions and methods; not of those that TensorFlow's hooks
    and optimizers have, too, whose types are TensorFlow's."""
    import inspect
    import towers
    for name, public in sorted(vars(towers).items()):
        if inspect.isfunction(public) and not name.startswith('_'):
            yield name, inspect.unwrap(public)
        if not inspect.isclass(public) or issubclass(public, Exception):
            continue
        for method, found in vars(public).items():
            function = getattr(found, '__func__', getattr(found, 'fget', found))
            is_inherited = any(hasattr(base, method) for base in public.__mro__[1:]
                               if not base.__module__.startswith('towers.'))
            is_made_by = method == ('__new__' if issubclass(public, tuple) else '__init__')
            if inspect.isfunction(function) and function.__name__ != '<lambda>' and (
                    is_made_by or not method.startswith('_') and not is_inherited):
                yield '%s.%s' % (name, method), function


def test_public_functions_carry_type_hints():
    """`py.typed` tells type checkers of users to look for them."""
    import inspect
    import typing
    import towers
    assert os.path.exists(os.path.join(os.path.dirname(towers.__file__), 'py.typed'))
    without = []
    for name, function in public_functions():
        typing.get_type_hints(function)  # names that do not exist are an error here
        signature = inspect.signature(function)
        without += [(name, each.name) for each in signature.parameters.values()
                    if each.name not in ('self', 'cls', '_cls') and each.annotation is each.empty
                    and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        if name.split('.')[-1] not in ('__new__', '__init__') and (
                signature.return_annotation is signature.empty):
            without.append((name, 'return'))
    assert without == []


def classes_in(hint):
    """The classes of this package in a type hint, such as `Optional[List[Difference]]`."""
    if isinstance(hint, type) and hint.__module__.startswith('towers.'):
        yield hint
    for part in getattr(hint, '__args__', None) or ():
        yield from classes_in(part)


def test_types_that_public_functions_return_are_public():
    """And the types of the fields of these."""
    import typing
    import towers
    hints = []
    for name, function in public_functions():
        if name.split('.')[-1] not in ('__new__', '__init__'):
            hints.append((name, typing.get_type_hints(function).get('return')))
    for name, public in vars(towers).items():
        if hasattr(public, '_fields'):
            hints += [('%s.%s' % (name, field), hint) for field, hint in
                      typing.get_type_hints(public).items()]
    public = {name for name, each in vars(towers).items() if isinstance(each, type)}
    for_this_package = {'DirectVariable', 'Engine', 'ScaledLosses', 'StepOfWorkers'}
    assert [(name, kind.__name__) for name, hint in hints for kind in classes_in(hint)
            if kind.__name__ not in public | for_this_package] == []


# ---- rooms ---------------------------------------------------------------------------------------

# As docs/architecture.md has them, from above to below; what is in no folder comes last.
ROOMS = ['launch', 'fronts', 'report', 'inspect', 'cluster', 'run', 'memory', 'api', 'reduce',
         'copies', 'roles', 'gradients', 'capture', 'whole_batch', 'variables', 'model', 'shards',
         'recompute', 'placement', 'checkpoint', 'proof', 'graph', 'for all rooms']


def room_of(module):
    name = module.split('.')[1]
    return name if name in ROOMS or os.path.isdir(
        os.path.join(ROOT, 'towers', name)) else 'for all rooms'


def statements(tree):
    """The statements of a module, in functions and branches too; `ast.walk` takes ten times as long
    for their expressions."""
    for field in ('body', 'orelse', 'finalbody', 'handlers'):
        for node in getattr(tree, field, ()):
            yield node
            yield from statements(node)


def imports_of_modules(*parts):
    """{a module below these folders and files: the names that it imports from modules}."""
    found = {}
    for path in [each for part in parts for each in glob.glob(os.path.join(ROOT, part),
                                                              recursive=True)]:
        with open(path, encoding='utf-8') as source:
            tree = ast.parse(source.read())
        module = os.path.relpath(path, ROOT)[:-len('.py')].replace(os.sep, '.')
        found[module] = {
            '%s.%s' % (node.module, alias.name) if isinstance(node, ast.ImportFrom)
            else alias.name for node in statements(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}
    return found


def test_rooms_import_from_those_below_alone():
    upward, others = [], set()
    imports = imports_of_modules('towers/**/*.py')
    del imports['towers.__init__']
    for module, names in imports.items():
        for name in names:
            if name.startswith('towers.'):
                if ROOMS.index(room_of(name)) < ROOMS.index(room_of(module)):
                    upward.append((module, name))
            else:
                others.add(name.split('.')[0])
    assert not upward
    assert not others & {'models', 'datasets', 'train', 'trainer', 'benchmarks'}
    rows = re.findall(r'^\| `(\w+)/` \|', pages.text('docs/architecture.md'), re.MULTILINE)
    assert [row for row in rows if row in ROOMS] == ROOMS[1:-1]


def test_modules_of_the_trainer_import_from_those_below_alone():
    """Below in the table of docs/architecture.md, which has each of them."""
    imports = {module.rpartition('.')[2]: {part for name in names if name.startswith('trainer.')
                                           for part in name.split('.')[1:]}
               for module, names in imports_of_modules('trainer/*.py', 'train.py').items()}
    section = pages.text('docs/architecture.md').split('## The trainer')[1].split('\n## ')[0]
    order = re.findall('`([^`]+)`', ' '.join(re.findall(r'^\| (`[^|]*) \|', section, re.M)))
    assert sorted(order + ['__init__', 'train']) == sorted(imports)
    assert [(name, each) for number, name in enumerate(order)
            for each in imports[name] & set(order[:number + 1])] == []
