"""quiet_import: what TensorFlow logs while it loads is left out, and nothing else is."""

import os
import subprocess
import sys

import pytest

ENVIRONMENT = {name: value for name, value in os.environ.items()
               if name != 'TF_CPP_MIN_LOG_LEVEL'}  # which tests/conftest.py sets
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LOGGED = (b'WARNING: All log messages before absl::InitializeLog() is called are written to '
          b'STDERR\\n'
          b'I0000 00:00:1.2 3 port.cc:153] oneDNN custom operations are on.\\n'
          b'W0000 00:00:1.2 3 a.cc:1] rounding\\n').decode()
PROGRAM = '''
import os, sys
from trainer.quiet_import import without_log_lines
%s
with without_log_lines():
    os.write(2, b"before\\n%s" b"E0000 an error\\n")
    %s
os.write(2, b"I0000 after\\n")
'''


def run(inside='pass', first='', **variables):
    return subprocess.run([sys.executable, '-c', PROGRAM % (first, LOGGED, inside)], cwd=ROOT,
                          env=dict(ENVIRONMENT, PYTHONPATH=ROOT, **variables),
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120,
                          universal_newlines=True)


def test_log_lines_are_left_out_and_the_rest_comes_in_order():
    done = run('os.write(2, b"no end"); print(os.environ["TF_CPP_MIN_LOG_LEVEL"])')
    assert (done.returncode, done.stdout) == (0, '3\n')
    assert done.stderr == 'before\nE0000 an error\nno endI0000 after\n'


@pytest.mark.parametrize('level, has', [('0', [1, 1, 1]), ('1', [0, 0, 1]), ('2', [0, 0, 0])])
def test_the_users_own_level_wins(level, has):
    done = run('print(os.environ["TF_CPP_MIN_LOG_LEVEL"])', TF_CPP_MIN_LOG_LEVEL=level)
    assert done.stdout == level + '\n' and 'E0000 an error' in done.stderr
    assert [text in done.stderr
            for text in ('absl::InitializeLog', 'oneDNN custom', 'W0000')] == has


def test_what_is_written_last_before_a_crash_comes_through():
    done = run('os.write(2, b"illegal instruction\\n"); os.abort()')
    assert done.returncode == -6
    assert done.stderr == 'before\nE0000 an error\nillegal instruction\n'


def test_an_error_of_the_import_is_told_and_leaves_no_process_behind():
    done = run('raise ImportError("no such library")',
               'import atexit\natexit.register(lambda: print(os.popen("ps --ppid %d" % os.getpid())'
               '.read().count("python")))')
    assert done.returncode == 1 and done.stderr.endswith('ImportError: no such library\n')
    assert done.stdout == '0\n'


def test_a_standard_error_that_is_closed():
    program = ('import os\nfrom trainer.quiet_import import without_log_lines\nos.close(2)\n'
               'with without_log_lines():\n    print("fine", flush=True)')
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, timeout=120,
                          env=dict(ENVIRONMENT, PYTHONPATH=ROOT), stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (0, b'fine\n')


@pytest.mark.slow
def test_tensorflow_starts_without_a_word():
    program = ('from trainer.quiet_import import without_log_lines\n'
               'with without_log_lines():\n    import tensorflow')
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', program], cwd=ROOT,
                          env=dict(ENVIRONMENT, PYTHONPATH=ROOT), timeout=300,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if b'0000 ' in line or b'absl' in line] == []
