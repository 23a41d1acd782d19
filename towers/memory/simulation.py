"""A step as TensorFlow's executor runs it: what is in memory after each operation.

An operation is ready when the last of its inputs is ready, and ready operations run first come
first served. The executor has two or more threads, of which each prefers what it has just made
ready; on average that is near this order, and the peaks are within 10 % of measured ones. (One
thread alone would put off all gradients of weights, and 15 % more memory.)

An operation lets go of its inputs when it has finished; an output is freed when the last operation
that takes it has finished.
"""

import collections

from towers.memory import kernels


class Buffer:
    """A piece of memory.

    Attributes:
      size: bytes.
      device: where it is.
      owners: list of `(event, Node, output)`: whose output it was from that event on.
      what: 'variable', 'output', 'scratch', 'transfer' (a copy of another device's tensor), or
        'update' (a variable's new memory while its old memory is still being read).
      variable: the `Node` of the variable that it holds or held; None for anything else.
      since, until: numbers of the events between which it is there; `until` is None at the end.
    """
    __slots__ = ('size', 'device', 'owners', 'what', 'since', 'until', 'references', 'variable')

    def __init__(self, size, device, node, output, what, since):
        self.size, self.device, self.what = size, device, what
        self.owners = [(since, node, output)]
        self.since, self.until = since, None
        self.references, self.variable = 0, None

    def owner(self, event):
        """`[Node, output]`: the output that the buffer holds at an event."""
        return [owner for since, *owner in self.owners if since <= event][-1]


class Run:
    """What a simulated step did.

    Attributes:
      buffers: list of `Buffer`, in order of allocation: the step's variables first. Constants are
        not among them.
      events: how many there were.
      peaks: dict from a device to `(bytes, event, Node)`; under None for all devices together.
    """

    def __init__(self):
        self.buffers = []
        self.events = 0
        self.peaks = {}
        self._now = collections.Counter()

    def allocate(self, size, device, node, output=0, what='output'):
        """A new `Buffer`, which an operation takes."""
        self.events += 1
        buffer = Buffer(size, device, node, output, what, self.events)
        self.buffers.append(buffer)
        if size:
            for place in (device, None):
                self._now[place] += size
                if self._now[place] > self.peaks.get(place, (0,))[0]:
                    self.peaks[place] = (self._now[place], self.events, node)
        return buffer

    def free(self, buffer):
        """Frees a buffer."""
        self.events += 1
        buffer.until = self.events
        self._now[buffer.device] -= buffer.size
        self._now[None] -= buffer.size

    def alive(self, event, device=None):
        """The buffers of a device (None: of all) that are there right after an event."""
        return [buffer for buffer in self.buffers
                if buffer.since <= event and (buffer.until is None or buffer.until > event)
                and device in (None, buffer.device) and buffer.size]


def simulate(step, onednn=False):
    """Runs a step without computing anything.

    Args:
      step: `StepGraph`.
      onednn: whether oneDNN's kernels run on CPUs.

    Returns:
      `Run`.
    """
    return _Simulation(step, onednn).run()


def _both_cpus(one, other):
    return 'CPU' in one and 'CPU' in other and _task(one) == _task(other)


def _task(device):
    return device.rsplit('/device:', 1)[0]


class _Simulation:

    def __init__(self, step, onednn):
        self._onednn = onednn
        self._run = Run()
        self._nodes = [node for node in step.nodes if not node.folded]
        self._waits = {}  # operation: how many others it waits for
        self._takers = collections.defaultdict(list)  # operation: those that wait for it
        self._uses = collections.defaultdict(list)  # (operation, output): devices of its takers
        self._held = {}  # (operation, output, device or None for its own): Buffer
        self._variables = {}  # variable: the Buffer that holds it now
        for node in self._nodes:
            sources = set()
            for other, index in self._inputs(node):
                sources.add(other.number)
                self._uses[other.number, index].append(node.device)
            sources.update(other.number for other in node.controls if not other.folded)
            self._waits[node.number] = len(sources) if node.type not in _MERGES else min(
                1, len(sources))
            for source in sources:
                self._takers[source].append(node)

    def run(self):
        """See `simulate`."""
        for node in self._nodes:
            if kernels.is_variable(node.type):
                buffer = self._run.allocate(kernels.variable_bytes(node), node.device, node,
                                            what='variable')
                buffer.references, buffer.variable = 1, node
                self._variables[node.number] = buffer
        waiting = collections.deque(node for node in self._nodes if not self._waits[node.number])
        started = {node.number for node in waiting}
        while waiting:
            node = waiting.popleft()
            self._begin(node)
            for taker in self._takers[node.number]:
                self._waits[taker.number] -= 1
                if self._waits[taker.number] <= 0 and taker.number not in started:
                    started.add(taker.number)
                    waiting.append(taker)
            self._end(node)
        return self._run

    # ---- one operation ---------------------------------------------------------------------------

    @staticmethod
    def _inputs(node):
        """Inputs that the step computes, without the back edges of loops: a loop is run once."""
        return [(other, index) for other, index in node.inputs if not other.folded
                and not (node.type in _MERGES and other.type in _BACK)]

    def _input(self, other, index, device):
        """The `Buffer` of an input on a device; None where it takes no memory."""
        return self._held.get((other.number, index, device),
                              self._held.get((other.number, index, None)))

    def _begin(self, node):
        if kernels.is_update(node.type):
            for position in kernels.updated_inputs(node):
                self._take_over(node, node.inputs[position][0])
        buffers = self._outputs(node)
        size = kernels.scratch(node, self._onednn) if 'CPU' in node.device else 0
        if size:
            scratch = self._run.allocate(size, node.device, node, what='scratch')
            scratch.references = 1
            self._held[node.number] = scratch
        for index, buffer in enumerate(buffers):
            if buffer is not None:
                buffer.references += 1  # until `_end` has counted the takers
                self._held[node.number, index, None] = buffer

    def _take_over(self, node, handle):
        """A variable that is still being read goes on in new memory."""
        number = kernels.variable_of(handle).number
        old = self._variables.get(number)
        if old is None or old.references == 1:
            return
        new = self._run.allocate(old.size, old.device, node, what='update')
        new.references, new.variable = 1, old.variable
        self._variables[number] = new
        self._release(old)

    def _outputs(self, node):
        """The `Buffer` of each output."""
        if kernels.is_variable(node.type):
            return [self._variables[node.number] if size else None for size in node.sizes]
        if node.type == 'ReadVariableOp':
            return [self._variables.get(kernels.variable_of(node.inputs[0][0]).number)]
        taken = self._taken(node)
        if kernels.passes_on(node):
            first = next((each for each in taken if each is not None), None)
            if node.type == 'IdentityN':
                return taken
            if first is not None or node.inputs:
                return [first if size else None for size in node.sizes]
        outputs = []
        for index, size in enumerate(node.sizes):
            buffer = None
            for position in kernels.REUSES.get(node.type, {}).get(index, ())[:len(taken)]:
                each = taken[position]
                if (each is not None and each.size == size and each.references == 1
                        and each.what != 'variable' and each not in outputs):
                    buffer = each
                    buffer.owners.append((self._run.events, node, index))
                    break
            if buffer is None and size:
                buffer = self._run.allocate(size, node.device, node, index)
            outputs.append(buffer)
        return outputs

    def _taken(self, node):
        """The `Buffer` of each input; None for a constant."""
        return [self._input(other, index, node.device) if not other.folded else None
                for other, index in node.inputs]

    def _end(self, node):
        scratch = self._held.pop(node.number, None)
        if scratch is not None:
            self._release(scratch)
        for index in range(len(node.sizes)):
            buffer = self._held.get((node.number, index, None))
            if buffer is None:
                continue
            elsewhere = collections.Counter()
            for device in self._uses.get((node.number, index), ()):
                if device == node.device or _both_cpus(node.device, device):
                    buffer.references += 1
                else:
                    elsewhere[device] += 1
            for device, count in elsewhere.items():
                moved = self._run.allocate(node.sizes[index], device, node, index, 'transfer')
                moved.references = count
                self._held[node.number, index, device] = moved
        for other, index in self._inputs(node):
            buffer = self._input(other, index, node.device)
            if buffer is not None:
                self._release(buffer)
        for index in range(len(node.sizes)):
            buffer = self._held.get((node.number, index, None))
            if buffer is not None and not kernels.is_fed(node.type):
                self._release(buffer)

    def _release(self, buffer):
        buffer.references -= 1
        if not buffer.references:
            self._run.free(buffer)


_MERGES = ('Merge', 'RefMerge')
_BACK = ('NextIteration', 'RefNextIteration')
