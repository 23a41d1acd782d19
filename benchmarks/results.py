"""The file of results: read, merged cell by cell, written after each."""

import json
import os
import time


class Results:
    """Results in a JSON file.

    Attributes:
      path: of the file.
      values: dict of all that is in it: `machine`, `runs`, `left_out`, and one entry a part.
    """

    def __init__(self, path):
        self.path, self.values = path, {}
        if self.exists():
            with open(path) as text:
                self.values = json.load(text)

    def exists(self):
        """Whether there is a file."""
        return os.path.exists(self.path)

    def begin(self, machine, arguments):
        """Notes a run: the machine as it is now, and what was asked for."""
        self.values['machine'] = machine
        self.values.setdefault('runs', []).append({
            'arguments': arguments or 'everything', 'load': machine['load'],
            'when': time.strftime('%Y-%m-%d %H:%M:%S')})
        self._write()

    def put(self, keys, value):
        """Sets `values[keys[0]][keys[1]]…`, what else is there stays, and writes the file."""
        inside = self.values
        for key in keys[:-1]:
            inside = inside.setdefault(key, {})
        inside[keys[-1]] = value
        self._write()

    def leave_out(self, cell, reason):
        """Notes that a cell was not measured."""
        self.put(['left_out', cell], reason)

    def take_back_in(self, cell):
        """Forgets that a cell was left out once."""
        self.values.get('left_out', {}).pop(cell, None)

    def beside(self, name):
        """Path of another file of this version's results."""
        return '%s-%s' % (os.path.splitext(self.path)[0], name)

    def _write(self):
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        with open(self.path + '.new', 'w') as text:
            json.dump(self.values, text, indent=1)
        os.replace(self.path + '.new', self.path)
